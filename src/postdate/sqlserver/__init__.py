"""SQL Server: connections, names, SQL. Imported by its store only."""
