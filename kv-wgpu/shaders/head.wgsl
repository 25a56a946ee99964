// Constants of one head: kv-core's PlaneConstants. `mean`, `into` and `back` are words of the
// binding `constants`.
struct Head {
    scale: f32,
    inv_scale: f32,
    mean: u32,
    into: u32,
    back: u32,
}

fn head_of(p: Plane, head: u32, has_constants: bool) -> Head {
    if !has_constants {
        return Head(1.0, 1.0, 0u, 0u, 0u);
    }
    let heads = p.num_kv_heads;
    let rows = 2u * heads + head * p.head_dim;
    let channels = heads * p.head_dim;
    return Head(bitcast<f32>(constants[head]), bitcast<f32>(constants[heads + head]), rows, rows + channels,
                rows + 2u * channels);
}
