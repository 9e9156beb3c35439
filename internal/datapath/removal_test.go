package datapath

import (
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/datapath/device"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
)

// removeTogether removes endpoints concurrently: all calls wait for the lock of devices before the first removal.
func (n *testNode) removeTogether(t testing.TB, records []endpoint.Record) error {
	t.Helper()
	errs := make([]error, len(records))
	var group sync.WaitGroup
	must(t, n.datapath.WithDeviceLock(func() error {
		for i, r := range records {
			group.Go(func() { errs[i] = n.datapath.removeEndpoint(t.Context(), r) })
		}
		for n.datapath.Removals.Waiting() < len(records) {
			time.Sleep(time.Millisecond)
		}
		return nil
	}))
	group.Wait()
	return errors.Join(errs...)
}

// TestRemoveTogether: concurrent removals are one batch, which removes no other device.
func TestRemoveTogether(t *testing.T) {
	w := newWireOf(t, paired)
	n := w.nodes[0]
	stays := n.add(t, blue, 1)
	var records []endpoint.Record
	for range 4 {
		records = append(records, n.create(t, blue, 1).record)
	}
	bystander := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "bystander", TxQLen: -1}, PeerName: "peer"}
	must(t, n.datapath.Netlink.LinkAdd(bystander))
	before := n.devices(t)
	// One of them has gone with its namespace.
	lost := records[3]
	gone, err := n.datapath.Netlink.LinkByName(lost.Device.HostName)
	must(t, err)
	must(t, n.datapath.Netlink.LinkDel(gone))
	must(t, n.removeTogether(t, records))
	after := n.devices(t)
	for _, r := range records {
		if after[r.Device.HostName] {
			t.Errorf("%s is left", r.Device.HostName)
		}
		delete(before, r.Device.HostName)
	}
	if fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("devices %v, want %v", after, before)
	}
	must(t, n.datapath.checkEndpoint(t.Context(), stays.record))
}

func (n *testNode) devices(t testing.TB) map[string]bool {
	t.Helper()
	links, err := n.datapath.Netlink.LinkList()
	must(t, err)
	names := map[string]bool{}
	for _, l := range links {
		names[l.Attrs().Name] = true
	}
	return names
}

// BenchmarkRemove compares the removal of ten devices one by one and as a group. Its result is the reason for groups.
func BenchmarkRemove(b *testing.B) {
	w := newWire(b)
	n := w.nodes[0]
	ten := func() []endpoint.Record {
		var records []endpoint.Record
		for range 10 {
			records = append(records, n.create(b, blue, 1).record)
		}
		return records
	}
	b.Run("one by one", func(b *testing.B) {
		for range b.N {
			b.StopTimer()
			records := ten()
			b.StartTimer()
			for _, r := range records {
				must(b, n.datapath.removeEndpoint(b.Context(), r))
			}
		}
	})
	b.Run("together", func(b *testing.B) {
		for range b.N {
			b.StopTimer()
			records := ten()
			b.StartTimer()
			must(b, n.removeTogether(b, records))
		}
	})
}

// BenchmarkRemoveMacvlans measures the kernel's time to remove a hundred macvlans concurrently, each in its own
// namespace. A hundred DELs cannot take less.
func BenchmarkRemoveMacvlans(b *testing.B) {
	node, err := netns.Create(filepath.Join(b.TempDir(), "node"))
	must(b, err)
	b.Cleanup(func() { must(b, errors.Join(node.Close(), netns.Remove(node.Path()))) })
	h, err := node.Netlink()
	must(b, err)
	b.Cleanup(h.Close)
	must(b, h.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "uplink", TxQLen: -1}, PeerName: "fabric"}))
	uplink, err := h.LinkByName("uplink")
	must(b, err)
	var inside [100]*device.ContainerNS
	for i := range inside {
		ns, err := netns.Create(filepath.Join(b.TempDir(), "container"))
		must(b, err)
		inside[i], err = device.OpenContainerNS(ns.Path())
		must(b, err)
		b.Cleanup(func() { must(b, errors.Join(inside[i].Close(), ns.Close(), netns.Remove(ns.Path()))) })
	}
	for b.Loop() {
		b.StopTimer()
		var links [len(inside)]netlink.Link
		for i, in := range inside {
			attrs := netlink.LinkAttrs{
				Name:        "eth0",
				TxQLen:      -1,
				ParentIndex: uplink.Attrs().Index,
				Namespace:   netlink.NsFd(in.Netns.FD()),
			}
			must(b, h.LinkAdd(&netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_PRIVATE}))
			links[i], err = in.LinkByName("eth0")
			must(b, err)
			must(b, in.LinkSetUp(links[i]))
		}
		var errs [len(inside)]error
		b.StartTimer()
		var all sync.WaitGroup
		for i, in := range inside {
			all.Go(func() { errs[i] = in.LinkDel(links[i]) })
		}
		all.Wait()
		b.StopTimer()
		must(b, errors.Join(errs[:]...))
		b.StartTimer()
	}
}
