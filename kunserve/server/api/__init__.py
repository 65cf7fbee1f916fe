"""What clients ask: bodies, prompts, chats, tools, and the routes that answer."""
