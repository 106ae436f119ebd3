"""From a token store to the batches of a run, in an order that the seed alone decides."""
