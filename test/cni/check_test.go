package cni_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
)

// victim is an endpoint that a test damages without the agent's knowledge.
type victim struct {
	inside, host *netlink.Handle
	device, peer netlink.Link // in the container, and on the node if it has an end there
	endpoint     *pilasterv1.Endpoint
	maps         string // folder of the node's pinned maps
}

func (v victim) attachment() *pilasterv1.Attachment { return v.endpoint.Attachments[0] }

func (v victim) gateway() netlink.Neigh {
	return netlink.Neigh{
		LinkIndex: v.device.Attrs().Index, Family: unix.AF_INET6, State: unix.NUD_PERMANENT,
		IP: net.ParseIP(v.attachment().Gateway),
	}
}

// pinned opens a pinned map.
func (v victim) pinned(name string) (*ebpf.Map, error) {
	pins, err := filepath.Glob(filepath.Join(v.maps, name+"_*")) // the suffix is the map's size
	if err != nil || len(pins) != 1 {
		return nil, errors.Join(err, fmt.Errorf("pins of %s: %q", name, pins))
	}
	return ebpf.LoadPinnedMap(pins[0], nil)
}

// forget removes an entry of a pinned map.
func (v victim) forget(name string, key []byte) error {
	m, err := v.pinned(name)
	if err != nil {
		return err
	}
	defer m.Close()
	return m.Delete(key)
}

// forgetAll removes all entries of a pinned map.
func (v victim) forgetAll(name string) error {
	m, err := v.pinned(name)
	if err != nil {
		return err
	}
	defer m.Close()
	keys, _, err := bpfobj.RawEntries(m)
	for _, key := range keys {
		err = errors.Join(err, m.Delete(key))
	}
	return err
}

func (v victim) forgetTenant(name string) error {
	return v.forget(name, binary.NativeEndian.AppendUint32(nil, v.endpoint.TenantId))
}

type breakage struct {
	name string
	do   func(victim) error
	said string // in CHECK's message, with {} for the host device's name
}

// breakages are damages of an endpoint that CHECK must detect.
var breakages = []breakage{
	{"address", func(v victim) error {
		a, err := netlink.ParseAddr(v.attachment().Address + "/128")
		if err != nil {
			return err
		}
		return v.inside.AddrDel(v.device, a)
	}, "address fc"},
	{"route", func(v victim) error {
		_, dst, err := net.ParseCIDR("fc00::/8")
		if err != nil {
			return err
		}
		return v.inside.RouteDel(&netlink.Route{LinkIndex: v.device.Attrs().Index, Dst: dst})
	}, "route fc00::/8 via fe80::1"},
	{"neighbour", func(v victim) error {
		n := v.gateway()
		return v.inside.NeighDel(&n)
	}, "neighbour fe80::1"},
	{"neighbour of another MAC", func(v victim) error {
		n := v.gateway()
		n.HardwareAddr = net.HardwareAddr{2, 0, 0, 0, 0, 9}
		return v.inside.NeighSet(&n)
	}, "neighbour fe80::1"},
	{"MAC", func(v victim) error {
		return v.inside.LinkSetHardwareAddr(v.device, net.HardwareAddr{2, 0, 0, 0, 0, 9})
	}, "link eth0 in the container has MAC 02:00:00:00:00:09"},
	{"link down", func(v victim) error { return v.inside.LinkSetDown(v.device) }, "link eth0 in the container is down"},
	{"local entry", func(v victim) error {
		a := netip.MustParseAddr(v.attachment().Plaintext).As16()
		return v.forget("pil_locals_v1", a[8:])
	}, "map entry pil_locals_v1 of fd70:696c:61"},
	{"source entry", func(v victim) error {
		a := netip.MustParseAddr(v.attachment().Address).As16()
		return v.forget("pil_sources_v2", a[:])
	}, "map entry pil_sources_v2 of fc"},
	{"tenant entry", func(v victim) error { return v.forgetTenant("pil_tenants_v2") },
		"map entry pil_tenants_v2 of tenant id "},
	{"key entry", func(v victim) error { return v.forgetTenant("pil_keys_v1") }, "map entry pil_keys_v1 of tenant id "},
	{"node's route", func(v victim) error {
		a := netip.MustParseAddr(v.attachment().Address)
		return v.host.RouteDel(&netlink.Route{Dst: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(128, 128)}})
	}, "the node has no route fc"},
}

var ofPair = []breakage{
	{"link", func(v victim) error { return v.inside.LinkDel(v.device) }, "link {}"}, // this also removes the other end
	{"host's link down", func(v victim) error { return v.host.LinkSetDown(v.peer) }, "link {} is down"},
}

// breakagesOf are further breakages, by kind of device.
var breakagesOf = map[string][]breakage{
	endpoint.Veth: append(ofPair, breakage{
		"program", func(v victim) error {
			return v.host.FilterDel(&netlink.BpfFilter{FilterAttrs: netlink.FilterAttrs{
				LinkIndex: v.peer.Attrs().Index, Parent: netlink.HANDLE_MIN_INGRESS, Handle: 1, Priority: 1,
				Protocol: unix.ETH_P_ALL,
			}})
		}, "program pil_container is not on {}",
	}),
	endpoint.Netkit: ofPair,
	endpoint.Macvlan: {
		{"link", func(v victim) error { return v.inside.LinkDel(v.device) },
			"link eth0 in the container: Link not found"},
		{"another mode", func(v victim) error {
			attrs := netlink.NewLinkAttrs()
			attrs.Index, attrs.Name = v.device.Attrs().Index, v.device.Attrs().Name
			return v.inside.LinkModify(&netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_BRIDGE})
		}, "is no longer in private mode"},
	},
}

// breakagesOfILA are damages of an endpoint on network ila.
var breakagesOfILA = []breakage{
	{"ila, address", breakages[0].do, "address fd"},
	{"ila, neighbour", breakages[2].do, "neighbour fe80::1"},
	{"ila, entry", func(v victim) error {
		a := netip.MustParseAddr(v.attachment().Address).As16()
		return v.forget("ila_locals_v2", a[8:])
	}, "the entry of fd70:696c:e100:"},
	{"ila, program", func(v victim) error {
		return v.host.FilterDel(&netlink.BpfFilter{FilterAttrs: netlink.FilterAttrs{
			LinkIndex: v.peer.Attrs().Index, Parent: netlink.HANDLE_MIN_INGRESS, Handle: 1, Priority: 1,
			Protocol: unix.ETH_P_ALL,
		}})
	}, "program pil_ila is not on {}"},
}

// breakagesOfEVPN are damages of an endpoint on network evpn.
var breakagesOfEVPN = []breakage{
	{"evpn, address", breakages[0].do, "address fd12:"},
	{"evpn, neighbour", breakages[2].do, "neighbour fe80::1"},
	{"evpn, sender", func(v victim) error { return v.forgetAll("evpn_senders_v1") }, "fd12:"},
	{"evpn, way", func(v victim) error { return v.forgetAll("evpn_forward_v1") }, "fd12:"},
	{"evpn, program", func(v victim) error {
		return v.host.FilterDel(&netlink.BpfFilter{FilterAttrs: netlink.FilterAttrs{
			LinkIndex: v.peer.Attrs().Index, Parent: netlink.HANDLE_MIN_INGRESS, Handle: 1, Priority: 1,
			Protocol: unix.ETH_P_ALL,
		}})
	}, "program pil_evpn is not on {}"},
}

// testCheck checks one breakage after another, each on a new endpoint. DEL must succeed after each breakage.
func testCheck(t *testing.T, n *node) {
	detects(t, n, "blue", slices.Concat(breakages, breakagesOf[labtest.Device()]))
	if labtest.Device() == endpoint.Veth {
		detects(t, n, "silver", breakagesOfILA)
		detects(t, n, "bronze", breakagesOfEVPN)
	}
}

func detects(t *testing.T, n *node, tenant string, all []breakage) {
	t.Helper()
	name := "check-" + tenant
	n.configure(t, name, conflist(t, "1.1.0", name, map[string]any{"tenant": tenant}))
	tool := newCNITool(t, n, name)
	outside, err := n.lab.Namespace(n.name)
	if err != nil {
		t.Fatal(err)
	}
	defer outside.Close()
	for _, b := range all {
		t.Run(b.name, func(t *testing.T) {
			ctx := labtest.Context(t)
			ns := n.container(t, "c1")
			v := victim{endpoint: tool.add(ctx, t, ns), inside: handle(t, ns), host: handle(t, outside),
				maps: filepath.Join(n.lab.BPF(n.name), "maps")}
			var err error
			if v.device, err = v.inside.LinkByName(lab.Interface); err != nil {
				t.Fatal(err)
			}
			if labtest.Device() != endpoint.Macvlan {
				if v.peer, err = v.host.LinkByName(v.endpoint.HostDevice); err != nil {
					t.Fatal(err)
				}
			}
			tool.must(ctx, t, "check", ns)
			if err := b.do(v); err != nil {
				t.Fatal(err)
			}
			said := strings.ReplaceAll(b.said, "{}", v.endpoint.HostDevice)
			if _, err := tool.run(ctx, "check", ns); err == nil || !strings.Contains(err.Error(), said) {
				t.Errorf("CHECK: got error %v, want %q in it", err, said)
			}
			tool.must(ctx, t, "del", ns)
			n.empty(ctx, t)
		})
	}
}
