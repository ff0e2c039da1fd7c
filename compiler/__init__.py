"""The compiler: frontend -> ir -> (passes) -> quantize, backends -> engine; golden measures it."""
