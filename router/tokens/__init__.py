"""From a request's prompt to the token ids that its engine will see."""
