//! The buffers of a group's planes.
use super::view::{Handles, PlaneView, StorageSource, StorageView};
use crate::geometry::PlaneLayout;
use crate::ids::Plane;

/// Memory of the layers of one group. A layer's memory is allocated once and never grows.
#[derive(Debug)]
pub struct KvStorage<Buf> {
    pub(super) layouts: [PlaneLayout; 2],
    pub(super) layers: Vec<Option<[PlaneBuffers<Buf>; 2]>>,
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
    /// Returns the layouts of the K and the V plane.
    pub fn layouts(&self) -> &[PlaneLayout; 2] {
        &self.layouts
    }
    /// Returns one plane of layer `index`, `None` while it has no memory.
    pub fn plane(&self, index: usize, plane: Plane) -> Option<PlaneView<'_, Buf>> {
        let [k, v] = self.layers.get(index)?.as_ref()?;
        let [k_layout, v_layout] = self.layouts;
        Some(match plane {
            Plane::Key => k.view(k_layout),
            Plane::Value => v.view(v_layout),
        })
    }
    /// Returns all planes, for operations over every layer at once.
    pub fn view(&self) -> StorageView<'_, Buf> {
        StorageView(StorageSource::Direct(self))
    }
}
