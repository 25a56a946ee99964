//! How a tensor of candle lies, in the words of the cache.
use std::ops::Range;

use candle_core::{Layout, Result, Tensor};
use kv::backend::Dims;
use kv::error::{Expected, PlanError};
use kv::{Axes, CacheError, Element, TensorView};

use crate::error::Error;

/// The axes of the tensors of a call. A caller names them by the method: extents cannot tell tokens
/// from heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// `[t, heads, dim]`: the tokens of all sequences follow each other.
    Packed,
    /// `[b, heads, s, dim]`.
    Bhsd,
}

impl Form {
    /// Refuses a tensor with another number of axes.
    pub(crate) fn check(self, tensor: &'static str, given: &Tensor) -> Result<()> {
        let (rank, expected, hint) = match self {
            Self::Packed => (
                3,
                "[tokens, heads, head_dim]",
                "squeeze(0) makes it of [1, tokens, heads, head_dim]; attend_bhsd takes \
                 [b, heads, s, head_dim]",
            ),
            Self::Bhsd => (
                4,
                "[b, heads, s, head_dim]",
                "attend takes the packed form [tokens, heads, head_dim]",
            ),
        };
        if given.rank() == rank {
            return Ok(());
        }
        let (got, expected) = (given.dims().to_vec(), expected.to_owned());
        Err(Error::Shape { tensor, got, expected, hint }.into())
    }
}

/// Returns an error of the cache as candle's, with the shape of a tensor as its caller passed it:
/// the cache names the axes of `[b, heads, s, dim]` in another order.
pub(crate) fn as_passed(error: CacheError, axes: Axes) -> candle_core::Error {
    match (error, axes) {
        (CacheError::Plan(PlanError::Shape { tensor, expected, got }), Axes::Bshd) => {
            let Expected { dims, .. } = expected;
            let hint = match (dims.as_slice(), got.as_slice()) {
                ([_, _, heads, _], [_, tokens, others, _])
                    if tokens == heads && others != heads =>
                {
                    "tokens come before heads here: transpose(1, 2)"
                }
                _ => "k and v have the kv_heads and head_dim of the CacheSpec, not repeated heads",
            };
            let got = heads_first(got).into_iter().filter_map(|n| usize::try_from(n).ok());
            let expected = Dims::new(&heads_first(dims));
            let expected = format!("[b at least, heads, s at least, head_dim] = {expected}");
            Error::Shape { tensor, got: got.collect(), expected, hint }.into()
        }
        (error, _) => candle_core::Error::wrap(error),
    }
}

/// Swaps the axes of tokens and heads.
fn heads_first(dims: Dims) -> Vec<u32> {
    match *dims.as_slice() {
        [b, s, heads, dim] => vec![b, heads, s, dim],
        ref others => others.to_vec(),
    }
}

/// Dimensions of a tensor as the cache names them, and where its values lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DenseRows {
    pub(crate) axes: Axes,
    dims: [u32; 4],
    rank: usize,
    /// Elements from a batch entry, and from a token, to the next.
    outer: [u64; 2],
    begin: usize,
    end: usize,
}

impl DenseRows {
    /// Describes a tensor `[t, heads, dim]` or `[b, heads, s, dim]`; `None` if the cache cannot
    /// read it in place, because the values of all heads of a token do not lie together.
    pub(crate) fn of(layout: &Layout) -> Option<Self> {
        let (axes, [batch, tokens, heads, dim], strides) = match (layout.dims(), layout.stride()) {
            (&[t, h, d], &[of_t, of_h, of_d]) => (Axes::Thd, [1, t, h, d], [0, of_t, of_h, of_d]),
            (&[b, h, s, d], &[of_b, of_h, of_s, of_d]) => {
                (Axes::Bshd, [b, s, h, d], [of_b, of_s, of_h, of_d])
            }
            _ => return None,
        };
        let [of_batch, of_token, of_head, of_value] = strides;
        let is_dense = (of_value == 1 || dim == 1) && (of_head == dim || heads == 1);
        // Rows of no stride, as `expand` makes them, would be one row.
        let is_spread = (of_token > 0 || tokens <= 1) && (of_batch > 0 || batch <= 1);
        if !is_dense || !is_spread {
            return None;
        }
        let row = heads.checked_mul(dim)?;
        let last = |count: usize, stride: usize| count.saturating_sub(1).checked_mul(stride);
        let reach =
            last(batch, of_batch)?.checked_add(last(tokens, of_token)?)?.checked_add(row)?;
        let begin = layout.start_offset();
        let n = |count: usize| u32::try_from(count).ok();
        let (dims, rank) = if axes == Axes::Thd {
            ([n(tokens)?, n(heads)?, n(dim)?, 0], 3)
        } else {
            ([n(batch)?, n(tokens)?, n(heads)?, n(dim)?], 4)
        };
        let outer = if rank == 3 { [of_token, 0] } else { [of_batch, of_token] };
        let [first, second] = outer.map(|stride| u64::try_from(stride).ok());
        let is_empty = batch == 0 || tokens == 0;
        let end = if is_empty { begin } else { begin.checked_add(reach)? };
        Some(Self { axes, dims, rank, outer: [first?, second?], begin, end })
    }

    /// Returns the dimensions: `[t, heads, dim]`, or `[b, s, heads, dim]`.
    pub(crate) fn dims(&self) -> &[u32] {
        &self.dims[..self.rank]
    }

    /// Returns heads and values of a head.
    pub(crate) fn head(&self) -> [u32; 2] {
        match *self.dims() {
            [.., heads, dim] => [heads, dim],
            _ => [0, 0],
        }
    }

    fn range(&self) -> Range<usize> {
        self.begin..self.end
    }

    /// Returns the view of a tensor whose storage is a buffer of a device.
    #[cfg(feature = "cuda")]
    pub(crate) fn on<'a, T: Element, Buf>(&self, storage: &'a Buf) -> TensorView<'a, Buf> {
        let begin = self.begin * size_of::<T>();
        let begin = u64::try_from(begin).unwrap_or(u64::MAX);
        TensorView::device(T::DTYPE, storage, begin, self.dims()).with_outer_strides(self.outer)
    }

    /// Returns the view of a tensor's storage in host memory; `None` if the storage is
    /// shorter than its layout.
    pub(crate) fn view<'a, T: Element, Buf>(&self, values: &'a [T]) -> Option<TensorView<'a, Buf>> {
        let view = TensorView::host(values.get(self.range())?, self.dims());
        Some(view.with_outer_strides(self.outer))
    }
}

/// Returns a tensor that can be read in place: the same one, or a copy, and whether it is one.
pub(crate) fn readable(tensor: &Tensor) -> Result<(Tensor, bool)> {
    if DenseRows::of(tensor.layout()).is_some() {
        return Ok((tensor.clone(), false));
    }
    let copy = match tensor.rank() {
        // Tokens before heads, as after a projection.
        4 => tensor.transpose(1, 2)?.contiguous()?.transpose(1, 2)?,
        _ => tensor.contiguous()?,
    };
    Ok((copy, true))
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;

    fn zeros(dims: &[usize]) -> Tensor {
        Tensor::zeros(dims, DType::F32, &Device::Cpu).expect("zeros")
    }

    #[test]
    fn projections_are_read_in_place_also_when_transposed() {
        let rows = zeros(&[5, 2, 8]);
        let dense = DenseRows::of(rows.layout()).expect("dense");
        assert_eq!((dense.axes, dense.dims(), dense.range()), (Axes::Thd, &[5, 2, 8][..], 0..80));
        // One of three parts of a fused projection.
        let fused = zeros(&[5, 6, 8]).narrow(1, 2, 2).expect("a part");
        let dense = DenseRows::of(fused.layout()).expect("dense heads");
        assert_eq!((dense.outer, dense.range()), ([48, 0], 16..16 + 4 * 48 + 16));
        let batch = zeros(&[3, 5, 2, 8]).transpose(1, 2).expect("[b, h, s, d]");
        let dense = DenseRows::of(batch.layout()).expect("a transposed projection");
        assert_eq!((dense.axes, dense.dims()), (Axes::Bshd, &[3, 5, 2, 8][..]));
        assert_eq!((dense.outer, dense.range()), ([80, 16], 0..240));
        // One token: no matter which axis comes first.
        assert!(DenseRows::of(zeros(&[3, 2, 1, 8]).layout()).is_some());
    }

    #[test]
    fn heads_apart_and_repeated_rows_are_not() {
        for tensor in [
            zeros(&[3, 2, 5, 8]),
            zeros(&[5, 8, 2]).transpose(1, 2).expect("values apart"),
            zeros(&[1, 2, 8]).expand((5, 2, 8)).expect("one row five times"),
            zeros(&[2, 8]),
            zeros(&[1, 5, 2, 8, 1]),
        ] {
            assert_eq!(DenseRows::of(tensor.layout()), None, "{:?}", tensor.layout());
        }
    }
}
