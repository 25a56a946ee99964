//! Host tensors of token rows in every axis order, with padding and gaps, written independently of
//! the library's index arithmetic.
use kv_core::{Axes, DType};

use crate::oracle::round::round_f32;

/// Elements of one type, in memory aligned for any of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    dtype: DType,
    words: Vec<u64>,
    len: usize,
}

impl Tensor {
    /// Makes `len` elements that each hold `value`.
    pub fn filled(dtype: DType, len: usize, value: f32) -> Self {
        let words = vec![0; (len * dtype.size()).div_ceil(8)];
        let mut tensor = Self { dtype, words, len };
        (0..len).for_each(|i| tensor.set(i, value));
        tensor
    }
    /// Makes elements from values, rounded.
    pub fn of(dtype: DType, values: &[f32]) -> Self {
        let mut tensor = Self::filled(dtype, values.len(), 0.0);
        values.iter().enumerate().for_each(|(i, x)| tensor.set(i, *x));
        tensor
    }
    /// Makes elements from bytes of a device.
    pub fn from_bytes(dtype: DType, bytes: &[u8]) -> Self {
        let mut tensor = Self::filled(dtype, bytes.len() / dtype.size(), 0.0);
        let len = tensor.len * dtype.size();
        tensor.bytes_mut().copy_from_slice(&bytes[..len]);
        tensor
    }
    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.len
    }
    /// Returns whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// Returns the bytes.
    pub fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.len * self.dtype.size()]
    }
    /// Returns the bytes, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let len = self.len * self.dtype.size();
        &mut bytemuck::cast_slice_mut(&mut self.words)[..len]
    }
    /// Returns one element's value.
    pub fn get(&self, i: usize) -> f32 {
        match self.dtype {
            DType::F16 => self.typed::<half::f16>(i).to_f32(),
            DType::Bf16 => self.typed::<half::bf16>(i).to_f32(),
            _ => self.typed::<f32>(i),
        }
    }
    /// Sets one element, rounded by the oracle.
    pub fn set(&mut self, i: usize, value: f32) {
        let exact = round_f32(self.dtype, value);
        match self.dtype {
            DType::F16 => self.typed_mut(i, half::f16::from_f32(exact)),
            DType::Bf16 => self.typed_mut(i, half::bf16::from_f32(exact)),
            _ => self.typed_mut(i, exact),
        }
    }
    /// Returns all values.
    pub fn values(&self) -> Vec<f32> {
        (0..self.len).map(|i| self.get(i)).collect()
    }
    fn typed<T: bytemuck::Pod>(&self, i: usize) -> T {
        bytemuck::cast_slice::<u8, T>(self.bytes())[i]
    }
    fn typed_mut<T: bytemuck::Pod>(&mut self, i: usize, value: T) {
        bytemuck::cast_slice_mut::<u8, T>(self.bytes_mut())[i] = value;
    }
}

/// The layout of token rows in a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenLayout {
    /// Axes.
    pub axes: Axes,
    /// Number of batch entries, padding included.
    pub batch: usize,
    /// Tokens per entry, padding included; the whole axis for `thd`.
    pub tokens: usize,
    /// Heads of a token.
    pub heads: usize,
    /// Values of one head.
    pub dim: usize,
    /// Unused elements after every token.
    pub gap: usize,
}

/// Padding of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Padding {
    /// Batch entries more than needed.
    pub batch: usize,
    /// Tokens more than needed.
    pub tokens: usize,
    /// Unused elements after every token.
    pub gap: usize,
}

impl TokenLayout {
    /// Makes the layout for entries of `lens` tokens.
    pub fn new(
        axes: Axes,
        lens: &[usize],
        [heads, dim]: [usize; 2],
        Padding { batch, tokens, gap }: Padding,
    ) -> Self {
        let longest = match axes {
            Axes::Thd => lens.iter().sum::<usize>(),
            _ => lens.iter().copied().max().unwrap_or(0),
        };
        Self { axes, batch: lens.len() + batch, tokens: longest + tokens, heads, dim, gap }
    }
    /// Returns the number of elements of one token, without its gap.
    pub fn row(&self) -> usize {
        self.heads * self.dim
    }
    /// Returns the number of token rows, padding included.
    pub fn num_rows(&self) -> usize {
        match self.axes {
            Axes::Thd => self.tokens,
            _ => self.batch * self.tokens,
        }
    }
    /// Returns the number of elements of the tensor.
    pub fn num_elements(&self) -> usize {
        self.num_rows() * (self.row() + self.gap)
    }
    /// Returns the extents.
    pub fn dims(&self) -> Vec<u32> {
        let [b, t, h, d] = [self.batch, self.tokens, self.heads, self.dim].map(|n| n as u32);
        match self.axes {
            Axes::Thd => vec![t, h, d],
            Axes::Sbhd => vec![t, b, h, d],
            _ => vec![b, t, h, d],
        }
    }
    /// Returns the outer strides, `None` when dense.
    pub fn strides(&self) -> Option<[u64; 2]> {
        let token = (self.row() + self.gap) as u64;
        (self.gap > 0).then_some(match self.axes {
            Axes::Thd => [token, 0],
            Axes::Sbhd => [token * self.batch as u64, token],
            _ => [token * self.tokens as u64, token],
        })
    }
    /// Returns the row number of token `i` of entry `entry`, whose tokens begin at ragged row
    /// `start`.
    pub fn row_number(&self, entry: usize, start: usize, i: usize) -> usize {
        match self.axes {
            Axes::Thd => start + i,
            Axes::Sbhd => i * self.batch + entry,
            _ => entry * self.tokens + i,
        }
    }

    /// Makes a tensor of the entries' rows, with `fill` everywhere else.
    pub fn pack(&self, dtype: DType, rows: &[Vec<f32>], fill: f32) -> Tensor {
        let mut tensor = Tensor::filled(dtype, self.num_elements(), fill);
        let mut start = 0;
        for (entry, values) in rows.iter().enumerate() {
            let tokens = values.len().checked_div(self.row()).unwrap_or(0);
            for i in 0..tokens {
                let at = self.row_number(entry, start, i) * (self.row() + self.gap);
                for (n, value) in values[i * self.row()..][..self.row()].iter().enumerate() {
                    tensor.set(at + n, *value);
                }
            }
            start += tokens;
        }
        tensor
    }

    /// Returns the rows of every entry.
    ///
    /// # Errors
    /// A message that names the padding row that is not `padding`, or the gap that was written.
    pub fn unpack(
        &self,
        what: &str,
        tensor: &Tensor,
        lens: &[usize],
        padding: f32,
    ) -> Result<Vec<Vec<f32>>, String> {
        let mut owned = vec![false; self.num_rows()];
        let mut rows = Vec::new();
        let mut start = 0;
        let stride = self.row() + self.gap;
        for (entry, &len) in lens.iter().enumerate() {
            let mut values = Vec::with_capacity(len * self.row());
            for i in 0..len {
                let number = self.row_number(entry, start, i);
                owned[number] = true;
                values.extend((0..self.row()).map(|n| tensor.get(number * stride + n)));
            }
            rows.push(values);
            start += len;
        }
        for (number, owned) in owned.into_iter().enumerate() {
            for n in 0..stride {
                let got = tensor.get(number * stride + n);
                if n < self.row() && !owned && got != padding {
                    return Err(format!(
                        "{what}: padding row {number} of {self:?} holds {got}, expected {padding}"
                    ));
                }
                if n >= self.row() && number + 1 < self.num_rows() && !got.is_nan() {
                    return Err(format!(
                        "{what}: the gap after row {number} of {self:?} was written: {got}"
                    ));
                }
            }
        }
        Ok(rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packs_every_format_by_hand() {
        let rows = [vec![1.0], vec![2.0, 3.0]];
        let lens = [1, 2];
        let pack = |axes, padding| {
            let layout = TokenLayout::new(axes, &lens, [1, 1], padding);
            let tensor = layout.pack(DType::F16, &rows, 0.0);
            assert_eq!(layout.unpack("x", &tensor, &lens, 0.0).unwrap(), rows);
            tensor.values()
        };
        assert_eq!(pack(Axes::Thd, Padding::default()), [1.0, 2.0, 3.0]);
        assert_eq!(pack(Axes::Bshd, Padding::default()), [1.0, 0.0, 2.0, 3.0]);
        assert_eq!(pack(Axes::Sbhd, Padding::default()), [1.0, 2.0, 0.0, 3.0]);
        let padding = Padding { batch: 1, tokens: 0, gap: 0 };
        assert_eq!(pack(Axes::Sbhd, padding), [1.0, 2.0, 0.0, 0.0, 3.0, 0.0]);
    }

    #[test]
    fn finds_written_gaps_and_padding() {
        let padding = Padding { batch: 0, tokens: 1, gap: 1 };
        let layout = TokenLayout::new(Axes::Thd, &[1], [1, 1], padding);
        let mut tensor = Tensor::of(DType::F32, &[5.0, f32::NAN, 0.0, f32::NAN]);
        assert_eq!(layout.unpack("x", &tensor, &[1], 0.0), Ok(vec![vec![5.0]]));
        tensor.set(1, 0.0);
        assert!(layout.unpack("x", &tensor, &[1], 0.0).unwrap_err().contains("gap"));
        tensor.set(1, f32::NAN);
        tensor.set(2, 1.0);
        assert!(layout.unpack("x", &tensor, &[1], 0.0).unwrap_err().contains("padding"));
    }
}
