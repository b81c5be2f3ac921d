"""Several processes that speak HTTP on one port, in front of one process that owns queue, models and engines.

One Python process spends a tenth to a third of a millisecond of its only thread on each small request, which is more
than a GPU spends on it. With ``--fronts N`` that work is done by N processes:

    client  <->  front (HTTP, keys, decoding, admission, encoding)  <->  lead (queue, sessions, models)  <->  engine

* The lead accepts connections and gives each to the front that has fewest (:mod:`.reception`). The kernel would deal
  them by a hash, unevenly for as long as they live, and not at all on unix sockets.
* A front writes the arrays of a request into shared memory once. The lead looks at their sizes, and gathers a batch
  from there into what it sends to the engine: beside the device, not between two batches (:mod:`.far`, :mod:`.peer`).
* The lead tells the fronts which models there are, and nothing is unloaded that a front still holds (:mod:`.hub`).
* Sessions are the lead's; a front keeps what it needs to read their steps.
* What is neither an evaluation nor a session is answered by the lead's own application.

A front that dies takes the requests with it that it was answering, and is started again (:mod:`.keeper`). Fronts end
with the lead.
"""
