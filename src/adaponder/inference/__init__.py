"""Generation that costs what the gates decided: requests in, tokens out."""
