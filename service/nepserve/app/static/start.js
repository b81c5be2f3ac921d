// The document is asked for relative to this page, so that it is found behind a proxy with a path prefix, too.
// No validator: it is a service elsewhere that would be told the address of this server.
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#page",
  validatorUrl: null,
  tryItOutEnabled: true,
  defaultModelsExpandDepth: 0,
});
