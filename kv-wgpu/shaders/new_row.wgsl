// A row of the step's input in `row_values`, through the plane's transform and with zeros behind its
// end: by all invocations of a workgroup, which have a barrier behind them.
fn load_new_row(read: u32, constant: Head, local: u32) {
    let p = params.plane;
    let dim = p.head_dim;
    for (var i = local; i < 256u; i += THREADS) {
        var x = 0.0;
        if i < dim {
            x = rows_load(params.rows.dtype, read, i);
            if p.transforms != 0u {
                let mean = bitcast<f32>(constants[constant.mean + i]);
                x = (x - mean) * bitcast<f32>(constants[constant.into + i]);
            }
        }
        row_values[i] = x;
    }
    workgroupBarrier();
    if p.transforms != 0u {
        rotate_row(dim, local);
    }
}
