//! What a caller of [`InferenceParams`](crate::InferenceParams) configures, checked once.
//!
//! Text becomes an enum here and nowhere later.
use std::fmt;

use kv_core::error::{PlanError, SpecError};
use kv_core::{Axes, CacheError, DType, KvFormat, UnknownName};

use crate::manager::{CacheManagerConfig, PageConfig};

/// Constructor arguments of [`InferenceParams`](crate::InferenceParams), under their original
/// names.
///
/// ```
/// use kv_compat::InferenceConfig;
/// use kv::DType;
/// let config = InferenceConfig::new(4, 4096)
///     .num_heads_kv(8)
///     .head_dim_k(128)
///     .dtype(DType::Bf16)
///     .is_paged(true)
///     .page_size(16)
///     .total_num_pages(300) // any number: 4 sequences of 4096 tokens would need 1024
///     .qkv_format("bshd");
/// # let _ = config;
/// ```
///
/// # Source
/// TransformerEngine, `InferenceParams.__init__`.
#[derive(Debug, Clone)]
pub struct InferenceConfig {
    max_batch_size: u32,
    max_sequence_length: u32,
    num_heads_kv: Option<u32>,
    head_dim_k: Option<u32>,
    head_dim_v: Option<u32>,
    dtype: Option<DType>,
    is_paged: bool,
    page_size: Option<u32>,
    total_num_pages: Option<u32>,
    qkv_format: Result<Axes, UnknownName>,
    max_ctx_len: Option<u32>,
}

/// The parts of a checked configuration.
pub(crate) struct Checked {
    pub(crate) manager: CacheManagerConfig,
    pub(crate) format: Axes,
    pub(crate) max_ctx_len: Option<u32>,
}

impl InferenceConfig {
    /// Starts with the two arguments that have no default: sequences in a batch, tokens in a
    /// sequence.
    pub fn new(max_batch_size: u32, max_sequence_length: u32) -> Self {
        Self {
            max_batch_size,
            max_sequence_length,
            num_heads_kv: None,
            head_dim_k: None,
            head_dim_v: None,
            dtype: None,
            is_paged: false,
            page_size: None,
            total_num_pages: None,
            qkv_format: Ok(Axes::Bshd),
            max_ctx_len: None,
        }
    }
    /// Heads of K and V; required.
    #[must_use]
    pub fn num_heads_kv(mut self, heads: u32) -> Self {
        self.num_heads_kv = Some(heads);
        self
    }
    /// Values of one row of K; required.
    #[must_use]
    pub fn head_dim_k(mut self, dim: u32) -> Self {
        self.head_dim_k = Some(dim);
        self
    }
    /// Values of one row of V; that of K unless set.
    #[must_use]
    pub fn head_dim_v(mut self, dim: u32) -> Self {
        self.head_dim_v = Some(dim);
        self
    }
    /// Element type of the cache and of every K and V given to it; required.
    #[must_use]
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = Some(dtype);
        self
    }
    /// Whether sequences share a pool of pages; without, each has room for the longest one.
    #[must_use]
    pub fn is_paged(mut self, is_paged: bool) -> Self {
        self.is_paged = is_paged;
        self
    }
    /// Tokens a page holds, a divisor of the maximum sequence length; required if paged, else
    /// ignored.
    #[must_use]
    pub fn page_size(mut self, tokens: u32) -> Self {
        self.page_size = Some(tokens);
        self
    }
    /// Pages of the pool, any number from 1; required if paged, else ignored.
    #[must_use]
    pub fn total_num_pages(mut self, pages: u32) -> Self {
        self.total_num_pages = Some(pages);
        self
    }
    /// Axes of the caller's tensors, by name or value; `bshd` unless set. An unknown name is
    /// refused by the constructor. Every [`step`](crate::InferenceParams::step) may choose anew.
    #[must_use]
    pub fn qkv_format<'n>(mut self, format: impl Into<FormatArg<'n>>) -> Self {
        self.qkv_format = format.into().resolve();
        self
    }
    /// Longest prompt, in tokens, `1..=max_sequence_length`; required for `thd`, kept for all
    /// formats.
    #[must_use]
    pub fn max_ctx_len(mut self, tokens: u32) -> Self {
        self.max_ctx_len = Some(tokens);
        self
    }

    /// Checks the arguments, and returns those of the manager: what
    /// [`InferenceParams::new`](crate::InferenceParams::new) does before it allocates anything.
    ///
    /// # Errors
    /// Those of [`InferenceParams::new`](crate::InferenceParams::new), except the device's.
    ///
    /// ```
    /// use kv_compat::InferenceConfig;
    /// use kv::DType;
    ///
    /// let config = InferenceConfig::new(4, 64).num_heads_kv(2).head_dim_k(8).dtype(DType::F16);
    /// assert_eq!(config.clone().manager_config()?.head_dim_v, 8);
    /// assert!(config.qkv_format("hbsd").manager_config().is_err());
    /// # Ok::<(), kv::CacheError>(())
    /// ```
    pub fn manager_config(self) -> Result<CacheManagerConfig, CacheError> {
        Ok(self.check()?.manager)
    }

    /// Checks in the order of the original: required values, pages, format.
    pub(crate) fn check(self) -> Result<Checked, CacheError> {
        let max_seqlen = self.max_sequence_length;
        at_least_one("max_batch_size", self.max_batch_size)?;
        at_least_one("max_sequence_length", max_seqlen)?;
        let num_heads = required("num_heads_kv", self.num_heads_kv)?;
        let head_dim_k = required("head_dim_k", self.head_dim_k)?;
        let dtype = self.dtype.ok_or(SpecError::Missing { field: "dtype" })?;
        stored_format(dtype)?;
        let head_dim_v = required("head_dim_v", self.head_dim_v.or(Some(head_dim_k)))?;
        let pages = if self.is_paged { Some(self.check_pages()?) } else { None };
        let format = self.qkv_format.map_err(PlanError::from)?;
        let field = "max_ctx_len";
        match self.max_ctx_len {
            None if format == Axes::Thd => return Err(SpecError::Missing { field }.into()),
            Some(0) => return Err(SpecError::Zero { field }.into()),
            Some(n) if n > max_seqlen => {
                let (got, max) = (u64::from(n), u64::from(max_seqlen));
                return Err(SpecError::TooLarge { field, got, max }.into());
            }
            _ => {}
        }
        let max_batch_size = self.max_batch_size;
        let manager = CacheManagerConfig {
            max_batch_size,
            max_seqlen,
            num_heads,
            head_dim_k,
            dtype,
            head_dim_v,
            pages,
        };
        Ok(Checked { manager, format, max_ctx_len: self.max_ctx_len })
    }

    fn check_pages(&self) -> Result<PageConfig, SpecError> {
        let page_size = required("page_size", self.page_size)?;
        let got = self.max_sequence_length;
        if got.checked_rem(page_size) != Some(0) {
            let (field, of) = ("max_sequence_length", "page_size");
            return Err(SpecError::NotDivisible { field, got, of, divisor: page_size });
        }
        let total_num_pages = required("total_num_pages", self.total_num_pages)?;
        Ok(PageConfig { total_num_pages, page_size })
    }
}

fn required(field: &'static str, value: Option<u32>) -> Result<u32, SpecError> {
    let value = value.ok_or(SpecError::Missing { field })?;
    at_least_one(field, value)?;
    Ok(value)
}

fn at_least_one(field: &'static str, n: u32) -> Result<(), SpecError> {
    if n == 0 { Err(SpecError::Zero { field }) } else { Ok(()) }
}

/// The format that stores `dtype` as it is.
pub(crate) fn stored_format(dtype: DType) -> Result<KvFormat, PlanError> {
    let same = |format: &&KvFormat| format.element() == Some(dtype);
    KvFormat::PLAIN.iter().find(same).copied().ok_or(PlanError::ElementType {
        tensor: "the cache",
        expected: "f32, f16 or bf16",
        got: dtype,
    })
}

/// Axes of a tensor, as a value or by the name other systems use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FormatArg<'n> {
    /// The value.
    Format(Axes),
    /// `bshd`, `sbhd` or `thd`.
    Name(&'n str),
}

impl FormatArg<'_> {
    /// The value.
    ///
    /// # Errors
    /// [`UnknownName`] for any other format or name, an output name such as `thd_2bshd` included.
    pub fn resolve(self) -> Result<Axes, UnknownName> {
        let format = match self {
            Self::Format(format) => format,
            Self::Name(name) => name.parse()?,
        };
        match format {
            Axes::Bshd | Axes::Sbhd | Axes::Thd => Ok(format),
            other => Err(UnknownName::new("qkv format", &other.to_string(), "bshd, sbhd, thd")),
        }
    }
}

impl From<Axes> for FormatArg<'_> {
    fn from(format: Axes) -> Self {
        Self::Format(format)
    }
}
impl<'n> From<&'n str> for FormatArg<'n> {
    fn from(name: &'n str) -> Self {
        Self::Name(name)
    }
}
impl<'n> From<&'n String> for FormatArg<'n> {
    fn from(name: &'n String) -> Self {
        Self::Name(name)
    }
}

/// Axes of q and of the cache after a step: the caller's own, then those of the cache where they
/// differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OutputFormat {
    /// All in `bshd`.
    Bshd,
    /// q in `sbhd`, K and V in `bshd`.
    Sbhd2bshd,
    /// q in `thd`, K and V in `bshd`.
    Thd2bshd,
}

impl OutputFormat {
    /// What goes with tensors of a format that [`FormatArg::resolve`] takes.
    pub(crate) fn of(format: Axes) -> Self {
        match format {
            Axes::Bshd => Self::Bshd,
            Axes::Sbhd => Self::Sbhd2bshd,
            Axes::Thd => Self::Thd2bshd,
            other => unreachable!("{other} was refused when it was given"),
        }
    }
    /// The name other systems use: `bshd`, `sbhd_2bshd` or `thd_2bshd`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bshd => "bshd",
            Self::Sbhd2bshd => "sbhd_2bshd",
            Self::Thd2bshd => "thd_2bshd",
        }
    }
}

impl fmt::Display for OutputFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
