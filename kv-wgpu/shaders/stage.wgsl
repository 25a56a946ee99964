fn stage_$name(buffer: u32, begin: u32, local: u32, scale: f32) {
    let token = local / 4u;
    let t = buffer * TILE + token;
    let is_here = how[t] != ABSENT;
    var factor = 1.0;
    if is_here {
        factor = $name_factor_of(t, scale);
    }
    for (var half = 0u; half < 2u; half++) {
        let at = local % 4u * 2u + half;
        let d = begin + at * 4u;
        var x = vec4<f32>(0.0);
        if is_here && d < params.$name.head_dim {
            x = $name_values(t, d, factor, scale);
        }
        stage[staged(token, at)] = x;
    }
}
