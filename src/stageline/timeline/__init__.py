"""When it ran or will run: costs, simulation, memory, comparison and drawings. No torch in here."""
