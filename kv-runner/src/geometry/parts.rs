//! The recurrent states of layers: tensors of fixed size for every sequence.
use kv::DType;

/// A part of the recurrent state of a layer: one tensor for every sequence.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_structs, reason = "a literal names each of the parts")]
pub struct StatePart {
    /// Kind of the tensor: "window" for the last inputs of a convolution, "matrix" or "vector" for
    /// what a recurrence adds up.
    pub name: &'static str,
    /// Extents of the tensor. A window has its channels, and one column less than its convolution.
    pub shape: Vec<u32>,
    /// Element type in which the recurrence is computed; `None` for windows, which hold inputs in
    /// the type of the activations.
    pub dtype: Option<DType>,
}

/// The recurrent state of one layer.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a literal names both")]
pub struct LayerStates {
    /// Index of the layer in the model.
    pub layer: u32,
    /// Tensors of the layer for every sequence.
    pub parts: Vec<StatePart>,
}

/// The layers of an architecture that have its state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layers {
    /// Those that its list of layers names as recurrent.
    Recurrent,
    /// All of them, those with attention included.
    All,
}

/// The state of a layer, and the layers that have it.
pub(super) type Found = (Vec<StatePart>, Layers);
