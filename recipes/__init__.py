"""The bundled recipes, one TOML file per purpose."""
