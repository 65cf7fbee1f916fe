"""POST /v1/responses: the stateless core of OpenAI's newer API."""
