package scale_test

import (
	"bufio"
	"context"
	"encoding/hex"
	"fmt"
	"io/fs"
	"maps"
	"net/http"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/unixrpc"
)

const (
	// cache is the flow cache. Its content depends on traffic, and it has a fixed number of slots.
	cache   = "pil_flows"
	aliases = "pil_aliases" // of nodes whose processes have sent to a container of an encrypted tenant
	// verdicts is the verdict cache. It is used only if a tenant has policies.
	verdicts = "pil_verdicts"
	outside  = "pil_overdicts" // the same for hosts outside of the cluster
)

// state is the state in a node's kernel that belongs to Pilaster and its traffic, by element.
type state struct {
	elements        map[string]string // "map pil_locals_v1 KEY" → value, "route …", "neighbour …", …
	slots, capacity int               // of the cache, on all CPUs
}

func (s *state) count(prefix string) (n int) {
	for key := range s.elements {
		if strings.HasPrefix(key, prefix) {
			n++
		}
	}
	return n
}

// same checks that another state of the node has exactly the same elements.
func (s *state) same(t *testing.T, other *state, when string) {
	t.Helper()
	keys := maps.Clone(s.elements)
	maps.Copy(keys, other.elements)
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		was, had := s.elements[key]
		is, has := other.elements[key]
		switch {
		case !has:
			t.Errorf("%s: %s was removed", when, key)
		case !had:
			t.Errorf("%s: %s = %s is new", when, key, is)
		case was != is:
			t.Errorf("%s: %s changed from %s to %s", when, key, was, is)
		}
	}
}

func dump(ctx context.Context, t *testing.T, l *lab.Lab, node string) *state {
	t.Helper()
	s := &state{elements: map[string]string{}}
	pinned, err := s.addPins(l.BPF(node))
	if err == nil {
		err = s.addUnpinned(l.BPF(node), pinned)
	}
	if err == nil {
		err = s.addNetwork(l, node)
	}
	if err != nil {
		t.Fatal(err)
	}
	// Dumps do not include route exceptions, such as path MTUs.
	exceptions, err := l.Output(ctx, node, "ip", "-6", "route", "show", "table", "all", "cache")
	if err != nil {
		t.Fatal(err)
	}
	s.elements["route cache"] = exceptions
	return s
}

// addPins records every element of every pinned map, and every other pin.
func (s *state) addPins(dir string) (pinned map[ebpf.MapID]bool, err error) {
	pinned = map[ebpf.MapID]bool{}
	err = filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		name, ok := strings.CutPrefix(path, filepath.Join(dir, "maps")+"/")
		if !ok {
			s.elements["pin "+path] = "is there"
			return nil
		}
		m, err := ebpf.LoadPinnedMap(path, nil)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		defer m.Close()
		info, err := m.Info()
		if err != nil {
			return err
		}
		id, _ := info.ID()
		pinned[id] = true
		s.elements["size of map "+name] = fmt.Sprintf("%v, %d × (%d + %d) bytes", m.Type(), m.MaxEntries(), m.KeySize(),
			m.ValueSize())
		if m.Type() == ebpf.RingBuf || m.Type() == ebpf.SkStorage {
			return nil // an event queue, which its reader drains; elements that belong to sockets
		}
		return eachElement(m, func(key, value []byte) {
			s.elements["map "+name+" "+hex.EncodeToString(key)] = hex.EncodeToString(value)
		})
	})
	return pinned, err
}

// eachElement lists a map's elements; a per-CPU value is the concatenation of all CPUs' values.
func eachElement(m *ebpf.Map, f func(key, value []byte)) error {
	var key, value []byte
	var values [][]byte
	elements := m.Iterate()
	if m.Type() == ebpf.PerCPUArray {
		for elements.Next(&key, &values) {
			f(key, slices.Concat(values...))
		}
	} else {
		for elements.Next(&key, &value) {
			f(key, value)
		}
	}
	if err := elements.Err(); err != nil {
		return fmt.Errorf("read %v: %w", m, err)
	}
	return nil
}

// addUnpinned finds the unpinned maps of the uplink's programs. It counts the used slots of the cache, and records the
// sizes of maps with a single element. It fails if there are other maps.
func (s *state) addUnpinned(dir string, pinned map[ebpf.MapID]bool) error {
	attached, err := link.LoadPinnedLink(filepath.Join(dir, "links", "uplink_in"), nil)
	if err != nil {
		return err
	}
	defer attached.Close()
	about, err := attached.Info()
	if err != nil {
		return err
	}
	program, err := ebpf.NewProgramFromID(about.Program)
	if err != nil {
		return err
	}
	defer program.Close()
	info, err := program.Info()
	if err != nil {
		return err
	}
	ids, _ := info.MapIDs()
	for _, id := range ids {
		if pinned[id] {
			continue
		}
		if err := s.addUnpinnedMap(id); err != nil {
			return err
		}
	}
	if s.capacity == 0 {
		return fmt.Errorf("the program uses no map %s", cache)
	}
	return nil
}

func (s *state) addUnpinnedMap(id ebpf.MapID) error {
	m, err := ebpf.NewMapFromID(id)
	if err != nil {
		return err
	}
	defer m.Close()
	info, err := m.Info()
	if err != nil {
		return err
	}
	switch {
	case info.Name == cache:
		return eachElement(m, func(_, value []byte) {
			for slot := range slices.Chunk(value, int(m.ValueSize())) {
				s.capacity++
				if slices.ContainsFunc(slot, func(b byte) bool { return b != 0 }) {
					s.slots++
				}
			}
		})
	case info.Name == verdicts, info.Name == outside:
		return eachElement(m, func(slot, value []byte) {
			if slices.ContainsFunc(value, func(b byte) bool { return b != 0 }) {
				s.elements[fmt.Sprintf("%s %x", info.Name, slot)] = fmt.Sprintf("%x", value)
			}
		})
	case info.Name == aliases:
		var key, value []byte
		entries := m.Iterate()
		for entries.Next(&key, &value) {
			s.elements[fmt.Sprintf("alias %x", key)] = fmt.Sprintf("%x", value)
		}
		return entries.Err()
	case m.MaxEntries() == 1: // constants, and the cipher's scratch space
		s.elements["size of unpinned map "+info.Name] = fmt.Sprintf("%v of %d bytes", m.Type(), m.ValueSize())
		return nil
	}
	return fmt.Errorf("the program uses map %s of %d entries, which is neither pinned nor one of the caches", info.Name,
		m.MaxEntries())
}

// addNetwork reads devices, addresses, routes, rules and neighbours.
func (s *state) addNetwork(l *lab.Lab, node string) error {
	ns, err := l.Namespace(node)
	if err != nil {
		return err
	}
	defer ns.Close()
	h, err := ns.Netlink()
	if err != nil {
		return err
	}
	defer h.Close()

	links, err := netns.List(h.LinkList)
	if err != nil {
		return err
	}
	names := map[int]string{}
	for _, link := range links {
		a := link.Attrs()
		names[a.Index] = a.Name
		s.elements["device "+a.Name] = fmt.Sprintf("%s, MTU %d, %v", link.Type(), a.MTU, a.HardwareAddr)
	}
	addresses, err := netns.List(func() ([]netlink.Addr, error) { return h.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return err
	}
	for _, a := range addresses {
		s.elements[fmt.Sprintf("address %v on %s", a.IPNet, names[a.LinkIndex])] = "is there"
	}
	routes, err := netns.List(func() ([]netlink.Route, error) {
		return h.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{Table: unix.RT_TABLE_UNSPEC},
			netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return err
	}
	for _, r := range routes {
		s.elements[fmt.Sprintf("route %d: %v via %v on %s, type %d, table %d, metric %d",
			r.Family, r.Dst, r.Gw, names[r.LinkIndex], r.Type, r.Table, r.Priority)] = "is there"
	}
	rules, err := netns.List(func() ([]netlink.Rule, error) { return h.RuleList(netlink.FAMILY_ALL) })
	if err != nil {
		return err
	}
	for _, r := range rules {
		s.elements[fmt.Sprintf("rule %d: %v", r.Family, r)] = "is there"
	}
	return s.addNeighbours(h, names)
}

// addNeighbours identifies a neighbour by its MAC: a router responds to several addresses, and the kernel's timers
// determine for which of them the kernel has an entry at a time.
func (s *state) addNeighbours(h *netlink.Handle, names map[int]string) error {
	neighbours, err := netns.List(func() ([]netlink.Neigh, error) { return h.NeighList(0, netlink.FAMILY_ALL) })
	if err != nil {
		return err
	}
	for _, n := range neighbours {
		switch {
		case n.IP.IsMulticast() || n.IP.IsLoopback():
		case len(n.HardwareAddr) == 0:
			s.elements[fmt.Sprintf("neighbour %v on %s", n.IP, names[n.LinkIndex])] = "is being resolved"
		default:
			s.elements[fmt.Sprintf("neighbour %v on %s", n.HardwareAddr, names[n.LinkIndex])] = "is there"
		}
	}
	return nil
}

// scrape reads the orchestrator's integer metrics.
func scrape(ctx context.Context, t *testing.T, l *lab.Lab) map[string]int {
	t.Helper()
	status, err := l.Status(ctx)
	if err != nil {
		t.Fatal(err)
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, unixrpc.URL+"/metrics", nil)
	if err != nil {
		t.Fatal(err)
	}
	response, err := unixrpc.Client(status.Orchestrator.Socket).Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	all := map[string]int{}
	for lines := bufio.NewScanner(response.Body); lines.Scan(); {
		name, value, _ := strings.Cut(lines.Text(), " ")
		if n, err := strconv.Atoi(value); err == nil {
			all[name] = n
		}
	}
	if _, ok := all[`pilaster_orchestrator_messages_total{direction="out",event="delta",procedure="/pilaster.v1.NodeService/Follow"}`]; !ok {
		t.Fatalf("the orchestrator does not count its messages: %v", all)
	}
	return all
}
