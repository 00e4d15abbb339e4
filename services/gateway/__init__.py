"""The gateway: the life of a request, from either door to the last token. It never touches KV memory."""
