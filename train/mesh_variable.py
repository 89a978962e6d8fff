"""The name under which a rank finds the mesh of its world: the supervision needs it without torch."""

MESH_VARIABLE = "MOEBIUS_MESH"  # the keys of the mesh that differ from config.json, as JSON
