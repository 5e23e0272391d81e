"""The code of exported folders, copied into them unchanged: it imports only torch and transformers."""
