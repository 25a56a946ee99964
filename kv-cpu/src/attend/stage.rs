//! Tiles that are decoded before many query rows meet them.
use super::Job;
use super::tile::{Seen, Tile, Tiles, meet};
use crate::encoding::{Element, Encoding, RowLayout};
use crate::kernel::{RowScale, StoredRows, TILE, TileRows};

/// Lets all query rows meet a tile that is decoded first.
pub(super) fn meet_staged(
    job: &Job<'_>,
    state: &mut Tiles<'_>,
    tile: &Tile<'_>,
    seen: &Seen<'_>,
    (k_stage, v_stage): (&mut [f32], &mut [f32]),
) {
    let heads = job.heads;
    let (mut k, mut v) = (TileRows::new(), TileRows::new());
    let layouts = [heads.dim_k, heads.dim_v].map(|dim| RowLayout::plain(Element::F32, dim));
    let [k_layout, v_layout] = &layouts;
    let (mut k_scales, mut v_scales) = ([1.0; TILE], [1.0; TILE]);
    let k_memory = (k_layout, heads.stride_k, k_stage, &mut k, &mut k_scales);
    let v_memory = (v_layout, heads.stride_v, v_stage, &mut v, &mut v_scales);
    let staged = Tile {
        bounds: tile.bounds,
        k: stage(job, tile.k, k_memory),
        v: stage(job, tile.v, v_memory),
        k_mean: tile.k_mean,
    };
    meet(job, state, &staged, seen);
}

/// Where a tile is staged: how its rows lie there, floats from one to the next, the floats, the
/// rows, and their scales.
type Stage<'s, 't> =
    (&'t RowLayout, usize, &'s mut [f32], &'t mut TileRows<'s>, &'t mut [f32; TILE]);

/// Decodes the rows of a tile, unless they are `f32` already. Scales of rows stay apart, so that
/// results have the bits of a tile that is not staged.
fn stage<'s: 't, 't>(job: &Job<'_>, from: StoredRows<'t>, to: Stage<'s, 't>) -> StoredRows<'t> {
    if from.layout.encoding() == Encoding::F32 {
        return from;
    }
    let (layout, stride, memory, staged, scales) = to;
    staged.clear(layout.bytes());
    for (row, memory) in from.rows.iter().zip(memory.chunks_exact_mut(stride)) {
        let (values, _) = memory.split_at_mut(layout.dim());
        job.cpu.kernels.decode(from.layout, row, values);
        staged.push(bytemuck::cast_slice(values), 0, 1);
    }
    let scale = match from.scale {
        RowScale::Stored => {
            *scales = job.cpu.kernels.row_scales(from.rows, from.layout);
            RowScale::Each(scales)
        }
        other => other,
    };
    StoredRows { rows: staged, layout, scale }
}
