"""Tools that every command of the lab uses: flags, tables, places."""
