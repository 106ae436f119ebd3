"""What watches over a run: checks of machines, signs of life, bad steps, silent corruption."""
