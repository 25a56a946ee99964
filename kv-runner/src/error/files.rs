//! Errors of a model's files: its description, weights and tokenizer.
use super::foreign::ForeignError;

/// An invalid or unsupported description of a model.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A count that must be at least 1.
    #[error("{field} is 0, at least 1 is needed")]
    Zero {
        /// The field.
        field: String,
    },
    /// A count that is too large.
    #[error("{field} is {got}, at most {max} is possible")]
    TooLarge {
        /// The field.
        field: String,
        /// Its value.
        got: u64,
        /// The largest value.
        max: u32,
    },
    /// A count that another one must divide.
    #[error("{field} {got} is not a multiple of {of} {divisor}")]
    NotDivisible {
        /// The field.
        field: &'static str,
        /// Its value.
        got: u32,
        /// The field that must divide it.
        of: &'static str,
        /// The value of that field.
        divisor: u32,
    },
    /// A number that must be above 0.
    #[error("{field} is {got}, a finite number above 0 is needed")]
    NotPositive {
        /// The field.
        field: &'static str,
        /// Its value.
        got: f64,
    },
    /// A field that must exist.
    #[error("{field} is missing")]
    Missing {
        /// The field.
        field: &'static str,
    },
    /// A model that keeps nothing in a KV cache.
    #[error("no KV cache: {why}")]
    NoCache {
        /// The reason.
        why: &'static str,
    },
    /// A description that cannot be planned, with its model type.
    #[error("{model}")]
    Model {
        /// The field and the name that it gives.
        model: String,
        /// The cause.
        source: Box<Self>,
    },
    /// An unsupported name.
    #[error("{field} {got:?} is not supported, expected {expected}")]
    Unsupported {
        /// The field.
        field: &'static str,
        /// Its value.
        got: String,
        /// The supported names.
        expected: &'static str,
    },
    /// A field with an invalid value.
    #[error("{field} {problem}")]
    Field {
        /// The field, with its place in the file.
        field: String,
        /// The value, and what was expected.
        problem: String,
    },
    /// Two fields that contradict each other.
    #[error("{first} is {first_value}, but {second} is {second_value}")]
    Contradiction {
        /// One field.
        first: String,
        /// Its value.
        first_value: String,
        /// The other field.
        second: String,
        /// Its value.
        second_value: String,
    },
}

/// A GGUF file that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GgufError {
    /// The head is damaged, or the file has another format.
    #[error("not a readable GGUF file")]
    NotReadable {
        /// The reader's error.
        source: ForeignError,
    },
    /// A tensor exceeds the address space.
    #[error("tensor {name} has shape {shape:?}, too large")]
    TooLarge {
        /// Its name.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// A tensor cannot be read.
    #[error("tensor {name}")]
    Tensor {
        /// Its name.
        name: String,
        /// The reader's error.
        source: ForeignError,
    },
    /// Two parts of a model have the same tensor.
    #[error("tensor {name} is in another part too")]
    Repeated {
        /// Its name.
        name: String,
    },
    /// A further part of a model was given instead of the first.
    #[error("part {number} of a model in {count} files, give {first} instead")]
    NotFirst {
        /// The number of the part, from 1.
        number: u32,
        /// Number of parts.
        count: u32,
        /// The name of the first part, if it can be derived.
        first: String,
    },
    /// The names of the other parts cannot be derived from the first part's name.
    #[error(
        "the first of {count} files (split.count), but its name does not end in \
         -00001-of-{count:05}.gguf, by which the others are found"
    )]
    Name {
        /// Number of parts.
        count: u32,
    },
    /// A part is not in the folder of the first one.
    #[error("part {number} of a model in {count} files is not there")]
    MissingPart {
        /// The number of the part, from 1.
        number: u32,
        /// Number of parts.
        count: u32,
    },
    /// A part has another number than its name says.
    #[error(
        "part {got} of {got_count} by split.no and split.count, expected {expected} of {count}"
    )]
    WrongPart {
        /// The number in its metadata, from 1.
        got: u32,
        /// The number of parts in its metadata.
        got_count: u32,
        /// The number in its name.
        expected: u32,
        /// Number of parts.
        count: u32,
    },
}

/// A tensor that differs from the configuration.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WeightError {
    /// No file has the tensor.
    #[error("tensor {name} is missing")]
    Missing {
        /// Its name.
        name: String,
    },
    /// The tensor's shape differs from the configuration.
    #[error("tensor {name} has shape {got:?}, expected {expected:?}")]
    Shape {
        /// Its name.
        name: String,
        /// Its shape.
        got: Vec<usize>,
        /// The expected shape.
        expected: Vec<usize>,
    },
    /// The tensor's elements are not floats.
    #[error("tensor {name} has element type {got}, expected f32, f16 or bf16")]
    ElementType {
        /// Its name.
        name: String,
        /// Its element type.
        got: String,
    },
    /// A factor of the rotary embedding is 0, negative or not finite.
    #[error("tensor {name} holds a factor that is not above 0")]
    Factor {
        /// Its name.
        name: &'static str,
    },
    /// The heads of a projection are wider in total than any matrix.
    #[error("{heads} heads of {head_dim} are too wide")]
    TooWide {
        /// Number of heads.
        heads: u32,
        /// Head dim.
        head_dim: u32,
    },
    /// Fused projections have more rows than any matrix.
    #[error("projections of {rows:?} rows are too wide for one matrix")]
    FusedTooWide {
        /// Rows of each projection.
        rows: Vec<u32>,
    },
    /// The index names a file outside its folder.
    #[error("{file:?} is not a plain file name")]
    FileName {
        /// The name.
        file: String,
    },
    /// A safetensors file is too short to have a header.
    #[error("no header")]
    NoHeader,
    /// A safetensors file ends inside its header.
    #[error("the header is longer than the file")]
    HeaderTooLong,
    /// The header of a safetensors file is damaged.
    #[error("header")]
    Header {
        /// The reader's error.
        source: ForeignError,
    },
    /// The length of a safetensors file differs from its header.
    #[error("the header says {expected} bytes of tensors, the file has {got}")]
    Length {
        /// Bytes by the header.
        expected: usize,
        /// Bytes of the file.
        got: usize,
    },
}

/// A text that cannot be read, or cannot be converted to tokens.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// A text file in another encoding, recognised by its first bytes.
    #[error("the file is {encoding} by its byte order mark, expected UTF-8")]
    Encoding {
        /// The encoding.
        encoding: &'static str,
    },
    /// A text file in an unknown encoding.
    #[error("not UTF-8, the first wrong byte is at {at}")]
    NotUtf8 {
        /// The offset of the invalid byte.
        at: usize,
    },
    /// A file that is not a tokenizer.
    #[error("not a tokenizer.json")]
    NotTokenizer {
        /// The reader's error.
        source: ForeignError,
    },
    /// The tokenizer failed on a text or on tokens.
    #[error(transparent)]
    Tokenizer(ForeignError),
    /// An empty prompt for a model without a begin token.
    #[error("the prompt is empty and the model has no bos_token_id")]
    Empty,
    /// A token beyond the model's vocabulary.
    #[error("the tokenizer gives token {token}, the model knows {vocab}: do they belong together?")]
    BeyondVocabulary {
        /// The token.
        token: u32,
        /// Size of the vocabulary.
        vocab: u32,
    },
}
