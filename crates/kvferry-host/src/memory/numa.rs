//! Which memory nodes pages come from: `mbind(2)` on a fresh mapping.

use std::ffi::{c_int, c_long, c_ulong, c_void};
use std::ptr::{self, NonNull};

use super::HostMemoryError;

/// Which memory nodes a buffer's pages come from. Decided before the first touch, whoever touches them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum NumaPolicy {
    /// The policy of the thread that touches a page first: the node it runs on, unless `numactl` said otherwise.
    #[default]
    Default,
    /// This node and no other. When it is full, touching fails or the kernel kills the process, however much memory
    /// other nodes have.
    Bind(u32),
    /// All nodes that this process may use in turn, page by page as they are touched (2 MiB where pages are huge).
    Interleave,
}

/// No kernel knows more nodes (`CONFIG_NODES_SHIFT` is at most 10).
const MAX_NODES: usize = 1024;
const WORD_BITS: usize = c_ulong::BITS as usize;
/// The calls take the number of bits plus one.
const MAXNODE: c_ulong = MAX_NODES as c_ulong + 1;
/// Flag of `get_mempolicy(2)` that libc does not name: the nodes in the thread's cpuset.
const MPOL_F_MEMS_ALLOWED: c_ulong = 1 << 2;

type NodeMask = [c_ulong; MAX_NODES / WORD_BITS];

/// A policy in the kernel's terms.
pub(super) struct Placement {
    policy: NumaPolicy,
    mode: c_ulong,
    mask: NodeMask,
}

impl NumaPolicy {
    /// What to tell the kernel, if anything.
    pub(super) fn placement(self) -> Result<Option<Placement>, HostMemoryError> {
        let allowed = || allowed().map_err(|errno| HostMemoryError::Numa { policy: self, errno });
        let (mode, mask) = match self {
            NumaPolicy::Default => return Ok(None),
            NumaPolicy::Bind(node) => {
                let nodes = members(&allowed()?);
                if !nodes.contains(&node) {
                    return Err(HostMemoryError::UnknownNode { node, nodes });
                }
                let mut mask = NodeMask::default();
                mask[node as usize / WORD_BITS] = 1 << (node as usize % WORD_BITS);
                (libc::MPOL_BIND as c_ulong, mask)
            }
            NumaPolicy::Interleave => (libc::MPOL_INTERLEAVE as c_ulong, allowed()?),
        };
        Ok(Some(Placement { policy: self, mode, mask }))
    }
}

impl Placement {
    /// Sets the policy of the fresh, untouched mapping of `len` bytes at the page boundary `base`.
    pub(super) fn apply(&self, base: NonNull<u8>, len: usize) -> Result<(), HostMemoryError> {
        let (base, len) = (base.as_ptr().cast::<c_void>(), len as c_ulong);
        let (mode, mask) = (self.mode, self.mask.as_ptr());
        // SAFETY: the arguments have the widths of the system call; the kernel reads MAX_NODES bits of the live mask
        // and changes where pages of the range will come from, never their content.
        let status = unsafe { libc::syscall(libc::SYS_mbind, base, len, mode, mask, MAXNODE, 0 as c_ulong) };
        check(status).map_err(|errno| HostMemoryError::Numa { policy: self.policy, errno })
    }
}

/// Memory nodes that the calling thread may take pages from, ascending.
///
/// # Errors
/// The kernel has no NUMA support (`ENOSYS`), or a container forbids the call (`EPERM`).
pub fn memory_nodes() -> std::io::Result<Vec<u32>> {
    allowed().map(|mask| members(&mask)).map_err(std::io::Error::from_raw_os_error)
}

fn members(mask: &NodeMask) -> Vec<u32> {
    let has = |node: &u32| mask[*node as usize / WORD_BITS] >> (*node as usize % WORD_BITS) & 1 == 1;
    (0..MAX_NODES as u32).filter(has).collect()
}

fn allowed() -> Result<NodeMask, i32> {
    let mut mask = NodeMask::default();
    let no_mode = ptr::null_mut::<c_int>();
    let no_address = ptr::null_mut::<c_void>();
    let (into, flags) = (mask.as_mut_ptr(), MPOL_F_MEMS_ALLOWED);
    // SAFETY: the arguments have the widths of the system call; the kernel writes MAX_NODES bits, the size of the live
    // mask, and needs neither mode nor address for this flag.
    let status = unsafe { libc::syscall(libc::SYS_get_mempolicy, no_mode, into, MAXNODE, no_address, flags) };
    check(status).map(|()| mask)
}

fn check(status: c_long) -> Result<(), i32> {
    if status == 0 { Ok(()) } else { Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(0)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{HUGE_PAGE_THRESHOLD, HostBuffer, HostOptions, HugePages};

    /// The nodes, or why there are none to test with.
    fn nodes() -> Option<Vec<u32>> {
        memory_nodes().inspect_err(|error| println!("skipped: no NUMA calls here: {error}")).ok()
    }

    /// What the kernel says of the mapping that holds `addr`: the policy, and the nodes its pages are on.
    fn placed(addr: u64) -> Option<(String, Vec<u32>)> {
        let maps = std::fs::read_to_string("/proc/self/numa_maps")
            .inspect_err(|error| println!("skipped: no numa_maps: {error}"))
            .ok()?;
        let start = |line: &str| u64::from_str_radix(line.split(' ').next().unwrap(), 16).unwrap();
        let line = maps.lines().filter(|line| start(line) <= addr).max_by_key(|line| start(line)).unwrap();
        let nodes = line
            .split(' ')
            .filter_map(|word| word.strip_prefix('N')?.split_once('=')?.0.parse().ok())
            .collect();
        Some((line.split(' ').nth(1).unwrap().to_owned(), nodes))
    }

    #[test]
    fn bound_pages_are_on_their_node() {
        let Some(nodes) = nodes() else { return };
        assert!(!nodes.is_empty());
        for &node in &nodes {
            for len in [1, HUGE_PAGE_THRESHOLD + 12_345] {
                for (huge_pages, first_touch_threads) in [(HugePages::Auto, 2), (HugePages::Off, 1)] {
                    let numa = NumaPolicy::Bind(node);
                    let options = HostOptions { huge_pages, numa, first_touch_threads };
                    let buffer = HostBuffer::new(len, options).unwrap();
                    let Some((policy, on)) = placed(buffer.addr()) else { return };
                    assert_eq!(policy, format!("bind:{node}"));
                    assert_eq!(on, [node]);
                }
            }
        }
    }

    #[test]
    fn interleaved_pages_are_on_all_nodes() {
        let Some(nodes) = nodes() else { return };
        let numa = NumaPolicy::Interleave;
        let options = HostOptions { huge_pages: HugePages::Off, numa, first_touch_threads: 1 };
        let buffer = HostBuffer::new(4 << 20, options).unwrap();
        let Some((policy, on)) = placed(buffer.addr()) else { return };
        assert!(policy.starts_with("interleave:"), "{policy}");
        assert_eq!(on, nodes);
    }

    #[test]
    fn the_default_sets_no_policy() {
        let buffer = HostBuffer::new(1, HostOptions::default()).unwrap();
        let Some((policy, _)) = placed(buffer.addr()) else { return };
        assert!(!policy.starts_with("bind") && !policy.starts_with("interleave"), "{policy}");
    }

    #[test]
    fn unknown_nodes_are_refused_by_name() {
        let Some(nodes) = nodes() else { return };
        for node in [MAX_NODES as u32 - 1, MAX_NODES as u32, 4096, u32::MAX] {
            if nodes.contains(&node) {
                continue;
            }
            let options = HostOptions { numa: NumaPolicy::Bind(node), ..HostOptions::default() };
            let error = HostBuffer::new(1, options).unwrap_err();
            assert_eq!(error, HostMemoryError::UnknownNode { node, nodes: nodes.clone() });
            assert!(error.to_string().contains(&format!("node {node} ")), "{error}");
            assert!(error.to_string().ends_with(&nodes.last().unwrap().to_string()), "{error}");
            assert_eq!(error.errno(), None);
        }
    }

    #[test]
    fn refusals_say_what_to_do() {
        for (errno, hint) in [(libc::ENOSYS, "NUMA support"), (libc::EPERM, "CAP_SYS_NICE")] {
            let error = HostMemoryError::Numa { policy: NumaPolicy::Bind(1), errno };
            assert!(error.to_string().contains("Bind(1)") && error.to_string().contains(hint), "{error}");
            assert_eq!(error.errno(), Some(errno));
        }
    }

    #[test]
    fn masks_are_read_bit_by_bit() {
        let mut mask = NodeMask::default();
        assert_eq!(members(&mask), []);
        (mask[0], mask[1]) = (0b101, 1);
        mask[MAX_NODES / WORD_BITS - 1] |= 1 << (WORD_BITS - 1);
        assert_eq!(members(&mask), [0, 2, WORD_BITS as u32, MAX_NODES as u32 - 1]);
    }
}
