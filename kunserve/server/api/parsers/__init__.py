"""What the text of a chat answer says: reasoning, content, and calls of tools."""
