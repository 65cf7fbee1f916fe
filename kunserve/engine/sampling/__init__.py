"""From logits to tokens: choices, bans, penalties, forms, scores."""
