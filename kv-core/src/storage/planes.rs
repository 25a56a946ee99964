//! The buffers of a group's planes.
use super::roles::BlockPlanes;
use super::view::{Handles, PlaneView, StorageSource, StorageView};
use crate::geometry::PlaneLayout;
use crate::ids::PlaneRole;

/// Memory of the layers of one group. A layer's memory is allocated once and never grows.
#[derive(Debug)]
pub struct KvStorage<Buf> {
    pub(super) planes: BlockPlanes,
    /// Buffers of a layer's planes, in the order of `planes`.
    pub(super) layers: Vec<Option<Box<[PlaneBuffers<Buf>]>>>,
}

/// The buffers of one plane.
#[derive(Debug)]
pub(super) struct PlaneBuffers<Buf> {
    pub(super) segments: Vec<Buf>,
    pub(super) constants: Option<Buf>,
}

impl<Buf> PlaneBuffers<Buf> {
    pub(super) fn view(&self, layout: PlaneLayout) -> PlaneView<'_, Buf> {
        PlaneView {
            layout,
            segments: Handles::Direct(&self.segments),
            constants: Handles::Direct(self.constants.as_slice()),
        }
    }
}

impl<Buf> KvStorage<Buf> {
    /// Returns whether layer `index` of the group has memory.
    pub fn is_allocated(&self, index: usize) -> bool {
        self.layers.get(index).is_some_and(Option::is_some)
    }
    /// Returns the number of layers with memory.
    pub fn num_allocated(&self) -> usize {
        self.layers.iter().flatten().count()
    }
    /// Returns the planes that every layer has.
    pub fn layouts(&self) -> &BlockPlanes {
        &self.planes
    }
    /// Returns one plane of layer `index`, `None` while the layer has no memory, or if it has no
    /// such plane.
    pub fn plane(&self, index: usize, role: impl Into<PlaneRole>) -> Option<PlaneView<'_, Buf>> {
        let role = role.into();
        let buffers = self.layers.get(index)?.as_ref()?;
        let mut planes = self.planes.as_slice().iter().zip(buffers);
        planes.find(|((of, _), _)| *of == role).map(|((_, layout), buffers)| buffers.view(*layout))
    }
    /// Returns all planes, for operations over every layer at once.
    pub fn view(&self) -> StorageView<'_, Buf> {
        StorageView(StorageSource::Direct(self))
    }
}
