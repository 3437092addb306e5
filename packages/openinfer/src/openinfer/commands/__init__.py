"""The `openinfer` command: one file per subcommand."""
