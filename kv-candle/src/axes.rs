//! How a tensor of candle lies, in the words of the cache.
use candle_core::{Layout, Result, Tensor};
use kv::backend::{AxisOrder, Dims, Strided, TensorData};
use kv::error::{Expected, PlanError};
use kv::num::to_u64;
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

/// A tensor that the cache can read in place, and the place of its first value in its storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DenseRows {
    placed: Strided,
    begin: usize,
    end: usize,
}

impl DenseRows {
    /// Describes a tensor `[t, heads, dim]` or `[b, heads, s, dim]`; `None` if the cache cannot
    /// read it in place.
    pub(crate) fn of(layout: &Layout) -> Option<Self> {
        let order = if layout.dims().len() == 3 { AxisOrder::Thd } else { AxisOrder::Bhsd };
        let shape: Vec<_> = layout.dims().iter().copied().map(to_u64).collect();
        let strides = layout.stride().iter().map(|stride| i64::try_from(*stride).ok());
        let strides: Vec<_> = strides.collect::<Option<_>>()?;
        let placed = Strided::new(order, &shape, &strides).ok()?;
        let begin = layout.start_offset();
        let end = begin.checked_add(usize::try_from(placed.len()).ok()?)?;
        Some(Self { placed, begin, end })
    }

    pub(crate) fn axes(&self) -> Axes {
        self.placed.axes()
    }

    /// Returns the dimensions: `[t, heads, dim]`, or `[b, s, heads, dim]`.
    pub(crate) fn dims(&self) -> Dims {
        self.placed.dims()
    }

    /// Returns heads and values of a head.
    pub(crate) fn head(&self) -> [u32; 2] {
        match *self.dims().as_slice() {
            [.., heads, dim] => [heads, dim],
            _ => [0, 0],
        }
    }

    /// Returns the view of a tensor whose storage is a buffer of a device.
    #[cfg(feature = "cuda")]
    pub(crate) fn on<'a, T: Element, Buf>(&self, buffer: &'a Buf) -> TensorView<'a, Buf> {
        let offset = to_u64(self.begin * size_of::<T>());
        TensorView::strided(T::DTYPE, TensorData::Device { buffer, offset }, &self.placed)
    }

    /// Returns the view of a tensor's storage in host memory; `None` if the storage is
    /// shorter than its layout.
    pub(crate) fn view<'a, T: Element, Buf>(&self, values: &'a [T]) -> Option<TensorView<'a, Buf>> {
        let values = TensorData::values(values.get(self.begin..self.end)?);
        Some(TensorView::strided(T::DTYPE, values, &self.placed))
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
    fn layouts_of_candle_are_read_in_place_from_their_first_value() {
        // One of three parts of a fused projection.
        let fused = zeros(&[5, 6, 8]).narrow(1, 2, 2).expect("a part");
        let dense = DenseRows::of(fused.layout()).expect("dense heads");
        assert_eq!((dense.axes(), dense.dims().as_slice()), (Axes::Thd, &[5, 2, 8][..]));
        assert_eq!((dense.begin, dense.end), (16, 16 + 4 * 48 + 16));
        let batch = zeros(&[3, 5, 2, 8]).transpose(1, 2).expect("[b, h, s, d]");
        let dense = DenseRows::of(batch.layout()).expect("a transposed projection");
        assert_eq!((dense.axes(), dense.dims().as_slice()), (Axes::Bshd, &[3, 5, 2, 8][..]));
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
