// Parameters of all shaders that write rows.
struct Params {
    plan: Plan,
    rows: Tensor,
    plane: Plane,
    has_constants: u32,
    num_runs: u32,
    pad0: u32,
    pad1: u32,
}
