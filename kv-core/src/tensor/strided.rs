//! Tensors as frameworks describe them: a shape, and a stride for each axis.
use super::{Dims, TensorData, TensorDataMut, TensorView, TensorViewMut};
use crate::geometry::Axes;
use kv_format::DType;

/// The order of a framework tensor's axes. The caller names it, because extents cannot tell tokens
/// from heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "these are the orders that models use")]
pub enum AxisOrder {
    /// `[t, heads, dim]`: the tokens of all sequences follow each other.
    Thd,
    /// `[b, s, heads, dim]`.
    Bshd,
    /// `[s, b, heads, dim]`.
    Sbhd,
    /// `[b, heads, s, dim]`, as attention functions of PyTorch and candle take it.
    Bhsd,
}

impl AxisOrder {
    /// Returns the axes as which a step takes the tensor: `[b, heads, s, dim]` is read in place as
    /// `[b, s, heads, dim]`.
    pub fn axes(self) -> Axes {
        match self {
            Self::Thd => Axes::Thd,
            Self::Bshd | Self::Bhsd => Axes::Bshd,
            Self::Sbhd => Axes::Sbhd,
        }
    }

    /// Returns the number of axes.
    pub fn rank(self) -> usize {
        if self == Self::Thd { 3 } else { 4 }
    }
}

/// The placement of a framework tensor that the cache can use in place: the values of all heads of
/// a token lie together, whatever the strides of tokens and batch entries are.
///
/// ```
/// use kv::backend::{AxisOrder, NullBuffer, Strided, TensorData};
/// use kv::{Axes, DType, TensorView};
///
/// // A projection [b, s, heads, dim], transposed to [b, heads, s, dim] by its model.
/// let placed = Strided::new(AxisOrder::Bhsd, &[3, 2, 5, 8], &[80, 8, 16, 1])?;
/// assert_eq!((placed.axes(), placed.dims().as_slice()), (Axes::Bshd, &[3, 5, 2, 8][..]));
/// assert_eq!(placed.len(), 240);
/// let bytes = [0; 240 * 4];
/// let view: TensorView<'_, NullBuffer> =
///     TensorView::strided(DType::F32, TensorData::Host(&bytes), &placed);
/// assert_eq!(view.dims().as_slice(), [3, 5, 2, 8]);
/// # Ok::<(), kv::backend::StridedError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Strided {
    axes: Axes,
    dims: Dims,
    outer: [u64; 2],
    len: u64,
}

impl Strided {
    /// Checks the shape and the strides of a tensor, in elements.
    ///
    /// # Errors
    /// [`StridedError`] if the cache cannot use the tensor in place: a contiguous copy can be used,
    /// for all problems but the number of axes and extents beyond 32 bits.
    pub fn new(order: AxisOrder, shape: &[u64], strides: &[i64]) -> Result<Self, StridedError> {
        let rank = order.rank();
        if shape.len() != rank || strides.len() != rank {
            return Err(StridedError::Rank { expected: rank, got: shape.len() });
        }
        let is_empty = shape.contains(&0);
        let at = |axis: usize| -> Result<(u64, u64), StridedError> {
            let (extent, stride) = (shape.get(axis).copied(), strides.get(axis).copied());
            let extent = extent.unwrap_or_default();
            // The stride of an axis with one entry is never used, nor is any of an empty tensor:
            // some frameworks call them all 0.
            let stride = if extent <= 1 || is_empty { 0 } else { stride.unwrap_or_default() };
            let stride = u64::try_from(stride).map_err(|_| StridedError::Negative { axis })?;
            Ok((extent, stride))
        };
        let [first, second, heads] = match order {
            AxisOrder::Thd => [at(0)?, (1, 0), at(1)?],
            AxisOrder::Bshd | AxisOrder::Sbhd => [at(0)?, at(1)?, at(2)?],
            AxisOrder::Bhsd => [at(0)?, at(2)?, at(1)?],
        };
        let (dim, of_value) = at(rank - 1)?;
        if dim > 1 && of_value != 1 && !is_empty {
            return Err(StridedError::ValuesApart { stride: of_value });
        }
        if heads.0 > 1 && heads.1 != dim && !is_empty {
            return Err(StridedError::HeadsApart { stride: heads.1, dim });
        }
        let outer = [first, second];
        if outer.iter().any(|(extent, stride)| *extent > 1 && *stride == 0) && !is_empty {
            return Err(StridedError::Repeated);
        }
        let len = if is_empty { Some(0) } else { reach(outer, heads.0, dim) };
        let len = len.ok_or(StridedError::TooLarge)?;
        let narrow = |extent: u64| u32::try_from(extent).map_err(|_| StridedError::TooLarge);
        let all = [narrow(first.0)?, narrow(second.0)?, narrow(heads.0)?, narrow(dim)?];
        let [t, _, heads, dim] = all;
        let dims = if rank == 3 { Dims::new(&[t, heads, dim]) } else { Dims::new(&all) };
        Ok(Self { axes: order.axes(), dims, outer: outer.map(|(_, stride)| stride), len })
    }

    /// Returns the axes as which a step takes the tensor.
    pub fn axes(&self) -> Axes {
        self.axes
    }
    /// Returns the extents, in the order of [`Self::axes`].
    pub fn dims(&self) -> Dims {
        self.dims
    }
    /// Returns the elements from the first one to the end of the last row; 0 for an empty tensor.
    pub fn len(&self) -> u64 {
        self.len
    }
    /// Returns whether the tensor has no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Returns the elements that rows of `heads * dim` values span, of a tensor that is not empty;
/// `None` past 64 bits.
fn reach(outer: [(u64, u64); 2], heads: u64, dim: u64) -> Option<u64> {
    outer.iter().try_fold(heads.checked_mul(dim)?, |sum, (extent, stride)| {
        sum.checked_add((extent - 1).checked_mul(*stride)?)
    })
}

impl<'a, Buf> TensorView<'a, Buf> {
    /// Describes a tensor of a framework, whose first element is the first of `data`. The data
    /// reach over [`Strided::len`] elements at least; the call that takes the view checks it.
    pub fn strided(dtype: DType, data: TensorData<'a, Buf>, placed: &Strided) -> Self {
        let view = match data {
            TensorData::Host(bytes) => Self::host_bytes(dtype, bytes, placed.dims.as_slice()),
            TensorData::Device { buffer, offset } => {
                Self::device(dtype, buffer, offset, placed.dims.as_slice())
            }
        };
        view.with_outer_strides(placed.outer)
    }
}

impl<'a, Buf> TensorViewMut<'a, Buf> {
    /// Describes an output tensor of a framework; see [`TensorView::strided`].
    pub fn strided(dtype: DType, data: TensorDataMut<'a, Buf>, placed: &Strided) -> Self {
        let view = match data {
            TensorDataMut::Host(bytes) => Self::host_bytes(dtype, bytes, placed.dims.as_slice()),
            TensorDataMut::Device { buffer, offset } => {
                Self::device(dtype, buffer, offset, placed.dims.as_slice())
            }
        };
        view.with_outer_strides(placed.outer)
    }
}

/// The reason for which the cache cannot use a framework tensor in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StridedError {
    /// The tensor has another number of axes.
    #[error("the tensor has {got} axes, {expected} are expected")]
    Rank {
        /// Axes expected.
        expected: usize,
        /// Axes given.
        got: usize,
    },
    /// An axis runs backwards.
    #[error("axis {axis} has a negative stride")]
    Negative {
        /// The axis.
        axis: usize,
    },
    /// The values of a row do not lie together.
    #[error("the values of a row are {stride} elements apart, they must lie together")]
    ValuesApart {
        /// Elements from one value to the next.
        stride: u64,
    },
    /// The heads of a token do not lie together.
    #[error("the heads of a token are {stride} elements apart, {dim} are expected")]
    HeadsApart {
        /// Elements from one head to the next.
        stride: u64,
        /// Values of a head.
        dim: u64,
    },
    /// Several tokens, or batch entries, are one row in memory, as an expanded tensor has them.
    #[error("several tokens are one row in memory")]
    Repeated,
    /// An extent does not fit 32 bits, or the tensor 64.
    #[error("the tensor is too large")]
    TooLarge,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placed(order: AxisOrder, shape: &[u64], strides: &[i64]) -> Result<Strided, StridedError> {
        Strided::new(order, shape, strides)
    }

    #[test]
    fn projections_are_used_in_place_also_when_transposed() {
        let rows = placed(AxisOrder::Thd, &[5, 2, 8], &[16, 8, 1]).unwrap();
        assert_eq!((rows.axes(), rows.dims().as_slice()), (Axes::Thd, &[5, 2, 8][..]));
        assert_eq!((rows.outer, rows.len()), ([16, 0], 80));
        // One of three parts of a fused projection.
        let part = placed(AxisOrder::Thd, &[5, 2, 8], &[48, 8, 1]).unwrap();
        assert_eq!((part.outer, part.len()), ([48, 0], 4 * 48 + 16));
        let heads_first = placed(AxisOrder::Bhsd, &[3, 2, 5, 8], &[80, 8, 16, 1]).unwrap();
        assert_eq!(heads_first, placed(AxisOrder::Bshd, &[3, 5, 2, 8], &[80, 16, 8, 1]).unwrap());
        assert_eq!((heads_first.outer, heads_first.len()), ([80, 16], 240));
        let tokens_first = placed(AxisOrder::Sbhd, &[5, 3, 2, 8], &[48, 16, 8, 1]).unwrap();
        assert_eq!((tokens_first.axes(), tokens_first.len()), (Axes::Sbhd, 240));
        assert_eq!(tokens_first.dims().as_slice(), [5, 3, 2, 8]);
    }

    #[test]
    fn strides_of_single_entries_do_not_matter() {
        for strides in [[16, 8, 16, 1], [-7, 8, 0, 1], [i64::MAX, 8, i64::MIN, 1]] {
            let one = placed(AxisOrder::Bhsd, &[1, 2, 1, 8], &strides).unwrap();
            assert_eq!((one.outer, one.len()), ([0, 0], 16), "{strides:?}");
        }
        assert_eq!(placed(AxisOrder::Thd, &[2, 1, 8], &[8, 3, 1]).unwrap().len(), 16);
        assert_eq!(placed(AxisOrder::Thd, &[2, 3, 1], &[3, 1, 9]).unwrap().len(), 6);
        for shape in [[0, 2, 8], [2, 0, 8], [2, 2, 0]] {
            for strides in [[16, 8, 1], [0, 0, 0], [-1, 3, 7]] {
                let empty = placed(AxisOrder::Thd, &shape, &strides).unwrap();
                assert_eq!((empty.outer, empty.len()), ([0, 0], 0), "{shape:?} {strides:?}");
            }
        }
    }

    #[test]
    fn every_problem_has_its_name() {
        use AxisOrder::{Bhsd, Thd};
        for (order, shape, strides, problem) in [
            (Thd, &[2, 8][..], &[8, 1][..], StridedError::Rank { expected: 3, got: 2 }),
            (Bhsd, &[2, 2, 8], &[16, 8, 1], StridedError::Rank { expected: 4, got: 3 }),
            (Thd, &[5, 2, 8], &[-16, 8, 1], StridedError::Negative { axis: 0 }),
            (Thd, &[5, 2, 8], &[16, 1, 2], StridedError::ValuesApart { stride: 2 }),
            (Bhsd, &[3, 2, 5, 8], &[80, 40, 8, 1], StridedError::HeadsApart { stride: 40, dim: 8 }),
            (Thd, &[5, 2, 8], &[0, 8, 1], StridedError::Repeated),
            (Bhsd, &[3, 2, 5, 8], &[0, 8, 16, 1], StridedError::Repeated),
            (Thd, &[1 << 32, 1, 1], &[1, 1, 1], StridedError::TooLarge),
            (Thd, &[9, 2, 8], &[i64::MAX, 8, 1], StridedError::TooLarge),
        ] {
            assert_eq!(placed(order, shape, strides), Err(problem), "{shape:?} {strides:?}");
        }
    }
}
