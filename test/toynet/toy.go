// Package toynet is the smallest network that an agent accepts, to show what CONTRIBUTING.md says under "Adding a
// network". Containers of one tenant on one node reach each other; packets to other nodes are dropped.
package toynet

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath"
	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/device"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/tenant"
)

//go:generate go tool bpf2go -cc clang-16 -strip llvm-strip-16 -target bpfel -type toy_endpoint Toy bpf/toy.bpf.c -- -I../../bpf -O2 -g -Wall -Werror -mcpu=v3
//go:generate go tool bpf2go -cc clang-16 -strip llvm-strip-16 -target bpfel Policed bpf/policed.bpf.c -- -I../../bpf -O2 -g -Wall -Werror -mcpu=v3

// Name is the network's name.
const Name = "toy"

// Traits are what the registry of networks knows of it.
var Traits = tenant.Traits{Name: Name, Addressings: []tenant.Addressing{tenant.Clear}}

var prefix = netip.MustParsePrefix("fd99::/64")

// Network implements network.Network.
type Network struct {
	objects   *ebpf.Collection
	endpoints *ebpf.Map
}

var _ network.Network = (*Network)(nil)

// New loads the programs and makes toy_container the entry program of its containers.
func New(path *datapath.Datapath) (*Network, error) {
	spec, err := LoadToy()
	if err != nil {
		return nil, err
	}
	objects, err := path.LoadNetwork(spec)
	if err != nil {
		return nil, err
	}
	const entry = "toy_container"
	path.SetEntry(Name, device.EntryProgram{Program: objects.Programs[entry], Name: entry})
	return &Network{objects, objects.Maps["toy_endpoint_v1"]}, nil
}

// Close releases this process's handles; packets keep flowing.
func (n *Network) Close() error { n.objects.Close(); return nil }

// Prepare gives an endpoint an address that contains its tenant's id and its number.
func (n *Network) Prepare(_ context.Context, t tenant.Tenant, _ address.AppID, r endpoint.Record) (
	[]endpoint.Attachment, error,
) {
	a := prefix.Addr().As16()
	id := t.Current().ID
	copy(a[8:], []byte{0, byte(id >> 16), byte(id >> 8), byte(id), 0, 0, byte(r.ID >> 8), byte(r.ID)})
	return []endpoint.Attachment{{
		Network: Name, Address: netip.AddrFrom16(a), Gateway: netip.MustParseAddr("fe80::1"),
		Routes: []netip.Prefix{prefix},
	}}, nil
}

// Release has nothing to do: the endpoint's number is released with its record.
func (n *Network) Release(context.Context, endpoint.Record) error { return nil }

// Validate refuses addresses outside of the network's prefix.
func (n *Network) Validate(r endpoint.Record) error {
	for _, a := range r.Attachments {
		if !prefix.Contains(a.Address) {
			return fmt.Errorf("endpoint %d: %v is not in %v", r.ID, a.Address, prefix)
		}
	}
	return nil
}

// PutTenant and DeleteTenant have nothing to do: the map has the tenant of each endpoint.
func (n *Network) PutTenant(context.Context, tenant.Tenant) error    { return nil }
func (n *Network) DeleteTenant(context.Context, tenant.Tenant) error { return nil }

func value(r endpoint.Record) ToyToyEndpoint {
	return ToyToyEndpoint{Ifindex: uint32(r.Device.HostIfindex), Tenant: uint32(r.TenantID)}
}

// Activate writes the endpoint's entries.
func (n *Network) Activate(_ context.Context, r endpoint.Record) error {
	for _, a := range r.Attachments {
		if err := n.endpoints.Put(bpfobj.ToAddr(a.Address), value(r)); err != nil {
			return fmt.Errorf("endpoint %d: write its entry: %w", r.ID, err)
		}
	}
	return nil
}

// Deactivate removes them.
func (n *Network) Deactivate(_ context.Context, r endpoint.Record) error {
	for _, a := range r.Attachments {
		err := n.endpoints.Delete(bpfobj.ToAddr(a.Address))
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("endpoint %d: remove its entry: %w", r.ID, err)
		}
	}
	return nil
}

// Check compares the entries with the record.
func (n *Network) Check(_ context.Context, r endpoint.Record) error {
	for _, a := range r.Attachments {
		var is ToyToyEndpoint
		if err := n.endpoints.Lookup(bpfobj.ToAddr(a.Address), &is); err != nil || is != value(r) {
			return errors.Join(fmt.Errorf("endpoint %d: the entry of %v is %+v", r.ID, a.Address, is), err)
		}
	}
	return nil
}

// Repair makes the map hold the endpoints found and no others.
func (n *Network) Repair(ctx context.Context, _, found []endpoint.Record) error {
	keep := map[bpfobj.PilasterAddr]bool{}
	for _, r := range found {
		if err := n.Activate(ctx, r); err != nil {
			return err
		}
		for _, a := range r.Attachments {
			keep[bpfobj.ToAddr(a.Address)] = true
		}
	}
	return bpfobj.DeleteOthers(n.endpoints, keep)
}

// Entries counts the entries in the kernel.
func (n *Network) Entries(context.Context) ([]network.Entries, error) {
	keys, err := bpfobj.MapKeys[bpfobj.PilasterAddr](n.endpoints)
	return []network.Entries{{Table: Name, Used: len(keys), Capacity: int(n.endpoints.MaxEntries())}}, err
}
