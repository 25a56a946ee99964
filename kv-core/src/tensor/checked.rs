//! Checked tensors: every extent, stride, type and byte count fits a plan.
use kv_format::DType;

use super::{Dims, Meta, TensorData, TensorDataMut, TensorView, TensorViewMut};
use crate::error::{Expected, PlanError};
use crate::geometry::Axes;
use crate::num::{to_offset, to_u64, to_usize};

/// The requirements of a plan for a token tensor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TokenRequirement {
    pub(crate) tensor: &'static str,
    pub(crate) axes: Axes,
    /// Minimum batch entries of the tensor.
    pub(crate) batch: u32,
    /// Longest entry, in tokens.
    pub(crate) tokens_max: u32,
    /// Tokens of all entries.
    pub(crate) tokens_total: u32,
    /// Exact head count, `None` when the caller chooses it.
    pub(crate) heads: Option<u32>,
    /// Exact row length.
    pub(crate) dim: u32,
}

/// Placement of the rows of a checked tensor: extents and strides, all in elements.
///
/// Guaranteed by the check: every row that a plan can name lies inside the tensor's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenRows {
    axes: Axes,
    dtype: DType,
    batch: u32,
    tokens: u32,
    heads: u32,
    dim: u32,
    batch_stride: u64,
    token_stride: u64,
}

impl TokenRows {
    /// Returns the axes of the tensor.
    pub fn axes(&self) -> Axes {
        self.axes
    }
    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }
    /// Returns the number of batch entries; 1 for `thd`.
    pub fn batch(&self) -> u32 {
        self.batch
    }
    /// Returns the maximum tokens of a batch entry; the whole `t` axis for `thd`.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }
    /// Returns the heads of a token.
    pub fn heads(&self) -> u32 {
        self.heads
    }
    /// Returns the values of one head's row.
    pub fn dim(&self) -> u32 {
        self.dim
    }
    /// Returns the elements from one batch entry to the next; 0 for `thd`.
    pub fn batch_stride(&self) -> u64 {
        self.batch_stride
    }
    /// Returns the elements from one token of an entry to its next.
    pub fn token_stride(&self) -> u64 {
        self.token_stride
    }
    /// Returns the index of the first element of token `i` of batch entry `entry`, whose tokens
    /// begin at row `start` of a ragged tensor. The token's heads and values follow densely. The
    /// strides are the caller's: for a token past the tensor, `usize::MAX` if it is more.
    #[inline]
    pub fn offset(&self, entry: usize, start: u32, i: u32) -> usize {
        let at = match self.axes {
            Axes::Thd => (u64::from(start) + u64::from(i)).saturating_mul(self.token_stride),
            Axes::Bshd | Axes::Sbhd => to_u64(entry)
                .saturating_mul(self.batch_stride)
                .saturating_add(u64::from(i).saturating_mul(self.token_stride)),
        };
        usize::try_from(at).unwrap_or(usize::MAX)
    }

    fn check(meta: Meta, need: &TokenRequirement) -> Result<Self, PlanError> {
        let expected = |axes, dims: &[u32]| {
            let expected = Expected { axes, dims: Dims::new(dims) };
            PlanError::Shape { tensor: need.tensor, expected, got: meta.dims }
        };
        if !meta.dtype.is_float() {
            let expected = "f32, f16 or bf16";
            return Err(PlanError::ElementType { tensor: need.tensor, expected, got: meta.dtype });
        }
        let heads_needed = need.heads.unwrap_or(0);
        let (shape, dims): (_, &[u32]) = match need.axes {
            Axes::Bshd => (
                "[b at least, s at least, h, d]",
                &[need.batch, need.tokens_max, heads_needed, need.dim],
            ),
            Axes::Sbhd => (
                "[s at least, b at least, h, d]",
                &[need.tokens_max, need.batch, heads_needed, need.dim],
            ),
            Axes::Thd => ("[t at least, h, d]", &[need.tokens_total, heads_needed, need.dim]),
        };
        let (first, second, heads, dim) = match (need.axes, meta.dims.exact()) {
            (Axes::Thd, Some(&[t, h, d])) => (t, 1, h, d),
            (Axes::Bshd | Axes::Sbhd, Some(&[x, y, h, d])) => (x, y, h, d),
            _ => return Err(expected(shape, dims)),
        };
        let heads_fit = need.heads.map_or(heads > 0, |h| h == heads);
        let row = u64::from(heads) * u64::from(dim);
        let [stride_first, stride_second] = meta.outer_strides.unwrap_or(match need.axes {
            Axes::Thd => [row, 0],
            // Rows past `u64` are past every tensor.
            Axes::Bshd | Axes::Sbhd => [row.saturating_mul(u64::from(second)), row],
        });
        let rows = match need.axes {
            Axes::Thd => (1, first, 0, stride_first),
            Axes::Bshd => (first, second, stride_first, stride_second),
            Axes::Sbhd => (second, first, stride_second, stride_first),
        };
        let (batch, tokens, batch_stride, token_stride) = rows;
        let room = match need.axes {
            Axes::Thd => tokens >= need.tokens_total,
            Axes::Bshd | Axes::Sbhd => batch >= need.batch && tokens >= need.tokens_max,
        };
        if !(heads_fit && dim == need.dim && room) {
            return Err(expected(shape, dims));
        }
        let (axes, dtype) = (need.axes, meta.dtype);
        Ok(Self { axes, dtype, batch, tokens, heads, dim, batch_stride, token_stride })
    }

    /// Returns the same rows without gaps between them.
    fn dense(&self) -> Self {
        let row = u64::from(self.heads) * u64::from(self.dim);
        // An empty tensor may have any extents.
        let of = |count: u32| u64::from(count).saturating_mul(row);
        let (batch_stride, token_stride) = match self.axes {
            Axes::Thd => (0, row),
            Axes::Bshd => (of(self.tokens), row),
            Axes::Sbhd => (row, of(self.batch)),
        };
        Self { batch_stride, token_stride, ..*self }
    }

    /// Returns the bytes from the first element to the end of the last row, `None` if that
    /// overflows.
    fn bytes_reached(&self) -> Option<u64> {
        if self.batch == 0 || self.tokens == 0 {
            return Some(0);
        }
        let last_batch = u64::from(self.batch - 1).checked_mul(self.batch_stride)?;
        let last_token = u64::from(self.tokens - 1).checked_mul(self.token_stride)?;
        let row = u64::from(self.heads).checked_mul(u64::from(self.dim))?;
        last_batch.checked_add(last_token)?.checked_add(row)?.checked_mul(to_u64(self.dtype.size()))
    }

    fn check_bytes(&self, tensor: &'static str, got: u64) -> Result<(), PlanError> {
        // More bytes than `u64` counts are more than any tensor has.
        let needed = self.bytes_reached().unwrap_or(u64::MAX);
        if needed > got {
            return Err(PlanError::TensorBytes { tensor, needed, got });
        }
        Ok(())
    }

    /// Returns whether two rows share an element: only distinct rows may be written.
    fn rows_overlap(&self) -> bool {
        if self.batch == 0 || self.tokens == 0 {
            return false;
        }
        let row = u64::from(self.heads) * u64::from(self.dim);
        let (near, far, near_count, far_count) = if self.batch_stride <= self.token_stride {
            (self.batch_stride, self.token_stride, self.batch, self.tokens)
        } else {
            (self.token_stride, self.batch_stride, self.tokens, self.batch)
        };
        // The strides are the caller's: no tensor in device memory has been refused yet.
        let near_span = u64::from(near_count - 1).saturating_mul(near).saturating_add(row);
        (near_count > 1 && near < row) || (far_count > 1 && far < near_span)
    }
}

fn check_host_alignment(tensor: &'static str, dtype: DType, bytes: &[u8]) -> Result<(), PlanError> {
    let align = dtype.size();
    if bytes.is_empty() || bytes.as_ptr().align_offset(align) == 0 {
        return Ok(());
    }
    Err(PlanError::Misaligned { tensor, align })
}

fn check_device_offset(tensor: &'static str, dtype: DType, offset: u64) -> Result<(), PlanError> {
    let align = dtype.size();
    match offset.checked_rem(to_u64(align)) {
        Some(0) => Ok(()),
        _ => Err(PlanError::Misaligned { tensor, align }),
    }
}

/// A checked input: rows of tokens, and their bytes.
///
/// Rows past an entry's tokens are padding and are never read. For device memory the backend itself
/// compares the reach ([`Self::bytes_reached`]) with the size of its buffer.
#[derive(Debug)]
pub struct TokenTensor<'a, Buf> {
    rows: TokenRows,
    data: TensorData<'a, Buf>,
}

impl<Buf> Clone for TokenTensor<'_, Buf> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<Buf> Copy for TokenTensor<'_, Buf> {}

impl<'a, Buf> TokenTensor<'a, Buf> {
    pub(crate) fn check(
        view: TensorView<'a, Buf>,
        need: &TokenRequirement,
    ) -> Result<Self, PlanError> {
        let rows = TokenRows::check(view.meta, need)?;
        match view.data {
            TensorData::Host(bytes) => {
                rows.check_bytes(need.tensor, to_u64(bytes.len()))?;
                check_host_alignment(need.tensor, rows.dtype, bytes)?;
            }
            TensorData::Device { offset, .. } => {
                check_device_offset(need.tensor, rows.dtype, offset)?;
            }
        }
        Ok(Self { rows, data: view.data })
    }
    /// Returns extents, strides and element type.
    pub fn rows(&self) -> &TokenRows {
        &self.rows
    }
    /// Returns where the bytes are.
    pub fn data(&self) -> TensorData<'a, Buf> {
        self.data
    }
    /// Returns the bytes from the first element to the end of the last row; `u64::MAX` if more.
    pub fn bytes_reached(&self) -> u64 {
        self.rows.bytes_reached().unwrap_or(u64::MAX)
    }
    /// Converts the buffer handle of the tensor.
    pub(crate) fn try_map<T: 'a, E>(
        self,
        cast: impl FnOnce(&'a Buf) -> Result<&'a T, E>,
    ) -> Result<TokenTensor<'a, T>, E> {
        let data = match self.data {
            TensorData::Host(bytes) => TensorData::Host(bytes),
            TensorData::Device { buffer, offset } => {
                TensorData::Device { buffer: cast(buffer)?, offset }
            }
        };
        Ok(TokenTensor { rows: self.rows, data })
    }
}

/// A checked output: rows of tokens, and where to write them.
///
/// Padding rows are written as zeros. No two rows overlap.
#[derive(Debug)]
pub struct TokenTensorMut<'a, Buf> {
    rows: TokenRows,
    data: TensorDataMut<'a, Buf>,
}

impl<'a, Buf> TokenTensorMut<'a, Buf> {
    pub(crate) fn check(
        view: TensorViewMut<'a, Buf>,
        need: &TokenRequirement,
    ) -> Result<Self, PlanError> {
        let rows = TokenRows::check(view.meta, need)?;
        match &view.data {
            TensorDataMut::Host(bytes) => {
                rows.check_bytes(need.tensor, to_u64(bytes.len()))?;
                check_host_alignment(need.tensor, rows.dtype, bytes)?;
            }
            TensorDataMut::Device { offset, .. } => {
                check_device_offset(need.tensor, rows.dtype, *offset)?;
            }
        }
        if rows.rows_overlap() {
            let strides = [rows.batch_stride, rows.token_stride];
            return Err(PlanError::Overlap { tensor: need.tensor, strides });
        }
        Ok(Self { rows, data: view.data })
    }
    /// Returns extents, strides and element type.
    pub fn rows(&self) -> &TokenRows {
        &self.rows
    }
    /// Returns the bytes from the first element to the end of the last row; `u64::MAX` if more.
    pub fn bytes_reached(&self) -> u64 {
        self.rows.bytes_reached().unwrap_or(u64::MAX)
    }
    /// Returns where to write.
    pub fn data(&mut self) -> &mut TensorDataMut<'a, Buf> {
        &mut self.data
    }
    /// Returns the bytes of all rows without gaps, for an output in host memory; `u64::MAX` if
    /// more.
    pub(crate) fn host_bytes(&self) -> Option<u64> {
        match &self.data {
            TensorDataMut::Host(_) => Some(self.rows.dense().bytes_reached().unwrap_or(u64::MAX)),
            TensorDataMut::Device { .. } => None,
        }
    }
    /// Replaces an output in host memory by rows without gaps, `offset` bytes into `buffer`.
    pub(crate) fn exchange(&mut self, buffer: &'a Buf, offset: u64) -> Option<HostRows<'a>> {
        if let TensorDataMut::Device { .. } = &self.data {
            return None;
        }
        let dense = self.rows.dense();
        let rows = std::mem::replace(&mut self.rows, dense);
        match std::mem::replace(&mut self.data, TensorDataMut::Device { buffer, offset }) {
            TensorDataMut::Host(bytes) => Some(HostRows { rows, bytes }),
            TensorDataMut::Device { .. } => None,
        }
    }
    /// Converts the buffer handle of the tensor.
    pub(crate) fn try_map<T: 'a, E>(
        self,
        cast: impl FnOnce(&'a Buf) -> Result<&'a T, E>,
    ) -> Result<TokenTensorMut<'a, T>, E> {
        let data = match self.data {
            TensorDataMut::Host(bytes) => TensorDataMut::Host(bytes),
            TensorDataMut::Device { buffer, offset } => {
                TensorDataMut::Device { buffer: cast(buffer)?, offset }
            }
        };
        Ok(TokenTensorMut { rows: self.rows, data })
    }
}

/// An output in host memory whose rows a device first writes elsewhere.
#[derive(Debug)]
pub(crate) struct HostRows<'a> {
    rows: TokenRows,
    bytes: &'a mut [u8],
}

impl HostRows<'_> {
    /// Copies every row of `staged`, which has no gaps; bytes between rows of the output stay.
    pub(crate) fn fill(self, staged: &[u8]) {
        let (rows, dense) = (self.rows, self.rows.dense());
        let size = rows.dtype.size();
        let row = to_offset(u64::from(rows.heads) * u64::from(rows.dim)) * size;
        for entry in 0..to_usize(rows.batch) {
            for token in 0..rows.tokens {
                let range = |rows: &TokenRows| {
                    let begin = rows.offset(entry, 0, token) * size;
                    begin..begin + row
                };
                // A checked tensor reaches its rows, and so do dense rows.
                self.bytes[range(&rows)].copy_from_slice(&staged[range(&dense)]);
            }
        }
    }
}
