package datapath

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/hook"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/netns"
)

// The Dump functions read pins and devices, whether an agent runs or not. Their types have no field for a key.

// Tables is the content of the maps pinned below a folder.
type Tables struct {
	Locals     []LocalEntry      `json:"locals"`
	Sources    []SourceEntry     `json:"sources"`
	Tenants    []TenantEntry     `json:"tenants"`
	Keys       []uint32          `json:"tenantIdsWithKey"`
	Ports      []PortEntry       `json:"ports"`
	Kept       []string          `json:"nimitz"` // entries that no record has: those of a network with mappings
	Generation uint32            `json:"generation"`
	Drops      map[string]uint64 `json:"drops"` // by reason, where there are any
}

// LocalEntry maps an address of this node to the device that packets for it go to.
type LocalEntry struct {
	LowHalf  string     `json:"plaintextLowHalf"` // the high half is the node's prefix
	Address  netip.Addr `json:"address"`
	Ifindex  uint32     `json:"ifindex"`
	Endpoint uint32     `json:"endpoint"`
}

// SourceEntry is an address that a container may send from.
type SourceEntry struct {
	Address   netip.Addr `json:"address"`
	Ifindex   uint32     `json:"ifindex"`
	Plaintext netip.Addr `json:"plaintext"`
	Endpoint  uint32     `json:"endpoint"`
	TenantID  uint32     `json:"tenantId"`
}

// PortEntry assigns a device's packets to another network.
type PortEntry struct {
	Ifindex uint32 `json:"ifindex"`
	Port    uint32 `json:"port"`
}

// TenantEntry is the entry of one tenant id.
type TenantEntry struct {
	ID      uint32     `json:"id"`
	IDs     []uint32   `json:"ids"`
	Clear   bool       `json:"clear"`
	Gateway netip.Addr `json:"gateway"` // this node among the tenant's containers
}

// DumpTables reads the maps pinned below bpffs.
func DumpTables(bpffs string) (Tables, error) {
	t := Tables{Drops: map[string]uint64{}}
	pinned := func(name string, read func(*ebpf.Map) error) error {
		pins, _ := filepath.Glob(filepath.Join(bpffs, bpfobj.MapsFolder, name+"*")) // of every size
		if len(pins) == 0 {
			return fmt.Errorf("%s: %w", name, os.ErrNotExist)
		}
		for _, pin := range pins {
			if err := bpfobj.ReadPinned(pin, read); err != nil {
				return fmt.Errorf("%s: %w", pin, err)
			}
		}
		return nil
	}
	err := errors.Join(
		pinned(bpfobj.PinLocals, func(m *ebpf.Map) error {
			return bpfobj.ForEachEntry(m, func(k uint64, v bpfobj.PilasterEpDst) {
				low := bpfobj.PilasterAddr{Lo: k}.Addr()
				t.Locals = append(t.Locals, LocalEntry{low.String(), v.Address.Addr(), v.Ifindex, v.Endpoint})
			})
		}),
		pinned(bpfobj.PinSources, func(m *ebpf.Map) error {
			return bpfobj.ForEachEntry(m, func(k bpfobj.PilasterAddr, v bpfobj.PilasterEpSrc) {
				t.Sources = append(
					t.Sources,
					SourceEntry{k.Addr(), v.Ifindex, v.Plain.Addr(), v.Endpoint, v.TenantId},
				)
			})
		}),
		pinned(bpfobj.PinTenants, func(m *ebpf.Map) error {
			return bpfobj.ForEachEntry(m, func(id uint32, v bpfobj.PilasterTenant) {
				e := TenantEntry{ID: id, Clear: v.Clear != 0, Gateway: v.Gateway.Addr()}
				for _, sibling := range v.Ids {
					if sibling != 0 {
						e.IDs = append(e.IDs, sibling)
					}
				}
				t.Tenants = append(t.Tenants, e)
			})
		}),
		pinned(bpfobj.PinKeys, func(m *ebpf.Map) error {
			ids, err := bpfobj.MapKeys[uint32](m)
			t.Keys = append(t.Keys, ids...)
			return err
		}),
		pinned(bpfobj.PinPorts, func(m *ebpf.Map) error {
			return bpfobj.ForEachEntry(
				m,
				func(device uint32, p bpfobj.PilasterDevEp) {
					t.Ports = append(t.Ports, PortEntry{device,
						p.Endpoint})
				},
			)
		}),
		pinned(bpfobj.PinGeneration, func(m *ebpf.Map) error { return m.Lookup(uint32(0), &t.Generation) }),
		pinned(bpfobj.PinDrops, func(m *ebpf.Map) error {
			for _, r := range dropreason.All() {
				var states []bpfobj.PilasterDropState
				if err := m.Lookup(uint32(r), &states); err != nil {
					return err
				}
				for _, s := range states {
					if s.Packets > 0 {
						t.Drops[r.String()] += s.Packets
					}
				}
			}
			return nil
		}),
	)
	for _, n := range networkParts() {
		for _, table := range n.kept {
			err = errors.Join(err, pinned(table.pin, func(m *ebpf.Map) error {
				entries, err := table.show(m)
				t.Kept = append(t.Kept, entries...)
				return err
			}))
		}
	}
	return t, err
}

// Pin is something pinned below a folder.
type Pin struct {
	Path       string `json:"path"`
	Kind       string `json:"kind"` // map, link
	ID         uint32 `json:"id"`
	Name       string `json:"name,omitempty"`
	MaxEntries uint32 `json:"maxEntries,omitempty"` // of a map
	Bytes      uint64 `json:"bytes,omitempty"`      // of the kernel's memory
	Ifindex    uint32 `json:"ifindex,omitempty"`    // a link is on
	Program    uint32 `json:"program,omitempty"`    // a link runs
}

// OnUplink reports whether the pin is a link on the uplink, not on another interface.
func (p Pin) OnUplink() bool {
	return p.Kind == "link" && strings.HasPrefix(filepath.Base(p.Path), "uplink_")
}

// DumpPins lists what is pinned below bpffs.
func DumpPins(bpffs string) ([]Pin, error) {
	var all []Pin
	var errs []error
	for folder, read := range map[string]func(path string) (Pin, error){bpfobj.MapsFolder: readMap,
		bpfobj.LinksFolder: readLink} {
		errs = append(
			errs,
			filepath.WalkDir(filepath.Join(bpffs, folder), func(path string, e fs.DirEntry, err error) error {
				if err != nil || e.IsDir() {
					return err
				}
				pin, err := read(path)
				if err != nil {
					errs = append(errs, fmt.Errorf("%s: %w", path, err))
					return nil
				}
				all = append(all, pin)
				return nil
			}),
		)
	}
	slices.SortFunc(all, func(a, b Pin) int { return cmp.Compare(a.Path, b.Path) })
	return all, errors.Join(errs...)
}

func readMap(path string) (Pin, error) {
	m, err := ebpf.LoadPinnedMap(path, &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return Pin{}, err
	}
	defer m.Close()
	info, err := m.Info()
	if err != nil {
		return Pin{}, err
	}
	id, _ := info.ID()
	memory, _ := info.Memlock()
	return Pin{
		Path:       path,
		Kind:       "map",
		ID:         uint32(id),
		Name:       info.Name,
		MaxEntries: info.MaxEntries,
		Bytes:      memory,
	}, nil
}

func readLink(path string) (Pin, error) {
	l, err := link.LoadPinnedLink(path, nil)
	if err != nil {
		return Pin{}, err
	}
	defer l.Close()
	info, err := l.Info()
	if err != nil {
		return Pin{}, err
	}
	pin := Pin{Path: path, Kind: "link", ID: uint32(info.ID), Program: uint32(info.Program)}
	if tcx := info.TCX(); tcx != nil {
		pin.Ifindex = tcx.Ifindex // 0: the device is gone
	}
	return pin, nil
}

// Hook is a place on a device with its programs, first to last.
type Hook struct {
	Device   string          `json:"device"`
	Hook     string          `json:"hook"`
	Programs []HookedProgram `json:"programs"`
}

// HookedProgram is one program of a chain.
type HookedProgram struct {
	Name string `json:"name"`
	ID   uint32 `json:"id"`
	Link uint32 `json:"link,omitempty"` // id; 0 where it was attached without one
}

// Chain returns the programs at a tcx hook of a device of the calling thread's namespace.
func Chain(device netlink.Link, attachPoint ebpf.AttachType) (Hook, error) {
	h := Hook{Device: device.Attrs().Name, Hook: attachPoint.String(), Programs: []HookedProgram{}}
	result, err := link.QueryPrograms(link.QueryOptions{Target: device.Attrs().Index, Attach: attachPoint})
	if err != nil {
		return h, err
	}
	for _, p := range result.Programs {
		id, _ := p.LinkID()
		h.Programs = append(h.Programs, HookedProgram{programName(p.ID), uint32(p.ID), uint32(id)})
	}
	return h, nil
}

func programName(id ebpf.ProgramID) string {
	if p, err := ebpf.NewProgramFromID(id); err == nil {
		defer p.Close()
		if info, err := p.Info(); err == nil && info.Name != "" {
			return info.Name
		}
	}
	return fmt.Sprintf("program %d", id)
}

// DumpHooks returns the tcx hooks of every device, and those of netkit devices, where there are programs, and the
// filters on devices of ours.
func DumpHooks() ([]Hook, error) {
	links, err := netns.List(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	var all []Hook
	var errs []error
	for _, l := range links {
		hooks := []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress}
		if n, ok := l.(*netlink.Netkit); ok && n.IsPrimary() { // the other side is asked here too
			hooks = append(hooks, ebpf.AttachNetkitPrimary, ebpf.AttachNetkitPeer)
		}
		for _, attachPoint := range hooks {
			h, err := Chain(l, attachPoint)
			errs = append(errs, err)
			if len(h.Programs) > 0 {
				all = append(all, h)
			}
		}
		if isOurs(l) {
			in, err := filters(l, "clsact ingress", netlink.HANDLE_MIN_INGRESS)
			out, err2 := filters(l, "clsact egress", netlink.HANDLE_MIN_EGRESS)
			errs, all = append(errs, err, err2), append(all, in, out)
		}
	}
	return all, errors.Join(errs...)
}

func isOurs(l netlink.Link) bool {
	_, container := host.DeviceID(l)
	return container || l.Attrs().Name == hook.NodeDevice || l.Attrs().Name == hook.NodeFar
}

func filters(l netlink.Link, attachPoint string, parent uint32) (Hook, error) {
	h := Hook{Device: l.Attrs().Name, Hook: attachPoint, Programs: []HookedProgram{}}
	list, err := netns.List(func() ([]netlink.Filter, error) { return netlink.FilterList(l, parent) })
	if err != nil {
		return h, fmt.Errorf("filters of %s: %w", h.Device, err)
	}
	for _, f := range list {
		if b, ok := f.(*netlink.BpfFilter); ok {
			h.Programs = append(h.Programs, HookedProgram{Name: b.Name, ID: uint32(b.Id)})
		}
	}
	return h, nil
}

// DumpSysctls returns the IP settings of our devices and of the others named.
func DumpSysctls(others ...string) (map[string]string, error) {
	links, err := netns.List(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	for _, l := range links {
		if isOurs(l) {
			others = append(others, l.Attrs().Name)
		}
	}
	all := map[string]string{}
	for _, name := range others {
		for _, family := range []string{"ipv4", "ipv6"} {
			dir := filepath.Join("/proc/sys/net", family, "conf", name)
			entries, err := os.ReadDir(dir)
			if err != nil {
				all[dir] = err.Error()
			}
			for _, e := range entries {
				path := filepath.Join(dir, e.Name())
				if e.Name() == secretSysctl {
					continue
				}
				b, err := os.ReadFile(path)
				if err != nil {
					all[path] = err.Error()
					continue
				}
				all[path] = strings.TrimSpace(string(b))
			}
		}
	}
	return all, nil
}

// secretSysctl is the secret from which the kernel computes stable addresses (RFC 7217).
const secretSysctl = "stable_secret"
