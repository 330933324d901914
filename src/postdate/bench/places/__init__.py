"""Where a benchmark takes place: files and servers, each with room for one run and physical limits of its own."""
