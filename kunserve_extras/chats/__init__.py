"""What endpoints share that are chats in the words of another API."""
