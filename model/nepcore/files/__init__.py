"""The files of the NEP world: model files, structure files, training inputs. None of it needs torch."""
