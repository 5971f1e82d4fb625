"""How each family of models writes its shape into a `config.json`: one small function each."""
