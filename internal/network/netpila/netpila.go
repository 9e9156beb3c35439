// Package netpila is the Go side of the default network (NETPILA §6): it allocates addresses that encode the
// container's location, so that no other node needs an update. The packet path is in package datapath.
package netpila

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/tenant"
)

// Name is the network's name in attachments.
const Name = tenant.Netpila

// Network allocates addresses for the endpoints of one node.
type Network struct {
	network.Dataplane
	on network.Node
}

// New returns the network of a node. It refuses a prefix outside the plan.
func New(on network.Node, path network.Dataplane) (*Network, error) {
	if err := on.Plan.Validate(); err != nil {
		return nil, err
	}
	if !on.Plan.ContainsNode(on.Prefix) {
		return nil, fmt.Errorf("node prefix %v is not a /64 in the base prefix %v", on.Prefix, on.Plan.Base)
	}
	return &Network{path, on}, nil
}

// Prepare allocates an address under the endpoint's tenant id and, if the tenant's rules require it, an egress address.
// It sends no message (NP1, §6.1). Release releases both.
func (n *Network) Prepare(
	_ context.Context,
	t tenant.Tenant,
	app address.AppID,
	r endpoint.Record,
) ([]endpoint.Attachment, error) {
	if app >= address.FirstReservedApp {
		return nil, fmt.Errorf("app %#x is reserved and never belongs to a container", app)
	}
	id := t.Of(r.TenantID)
	if id.ID == 0 {
		return nil, fmt.Errorf("tenant %s has no id %d", t.Name, r.TenantID)
	}
	key := endpoint.CursorKey{Tenant: id.ID, App: app}
	plain := address.Plain{Node: n.on.Prefix, Tenant: id.ID, App: app}
	a := endpoint.Attachment{Network: Name, Gateway: netip.MustParseAddr("fe80::1")}

	var err error
	if t.Addressing == tenant.Clear {
		plain.Index, err = n.on.Indexes.AllocateIndex(key, firstIndex)
		a.Address = plain.Addr()
		a.Routes = []netip.Prefix{n.on.Plan.Base}
	} else {
		cipher := address.NewCipher(id.Key)
		plain.Index, err = n.on.Indexes.AllocateIndex(key, func(from address.Index) (address.Index, error) {
			plain.Index = from
			found, _, err := cipher.Draw(n.on.Plan.Private, plain)
			return found.Index, err
		})
		a.Address = cipher.Encrypt(plain.Addr())
		a.Routes = []netip.Prefix{n.on.Plan.Private}
	}
	if errors.Is(err, endpoint.ErrExhausted) {
		return nil, fmt.Errorf(
			"tenant %s app %d: %w\n  nothing was changed; `pilaster tenant rotate-key %s` gives the tenant an id "+
				"with fresh addresses; until then use another node, or labels that make another app",
			t.Name,
			app,
			err,
			t.Name,
		)
	}
	if err != nil {
		return nil, fmt.Errorf("tenant %s app %d: %w", t.Name, app, err)
	}
	a.Plaintext = plain.Addr()
	settled, err := n.on.Egress.Settle(t, r, a)
	if err != nil {
		return nil, errors.Join(err, n.on.Indexes.ReleaseIndex(key, plain.Index))
	}
	return []endpoint.Attachment{settled}, nil
}

// firstIndex accepts every index: a clear address need not lie in the private prefix.
func firstIndex(from address.Index) (address.Index, error) {
	if from > address.MaxIndex {
		return 0, address.ErrExhausted
	}
	return from, nil
}

// Release puts the addresses into quarantine.
func (n *Network) Release(_ context.Context, r endpoint.Record) error {
	for _, a := range r.Attachments {
		if key, i, drawn := r.AllocatedIndex(a); drawn {
			if err := n.on.Indexes.ReleaseIndex(key, i); err != nil {
				return err
			}
		}
		if err := n.on.Egress.Release(a.Egress); err != nil {
			return err
		}
	}
	return nil
}

// Validate refuses a plaintext address that does not name the tenant id and the app, and an egress address that is not
// this node's.
func (n *Network) Validate(r endpoint.Record) error {
	for _, a := range r.Attachments {
		if !a.Address.Is6() || !a.Plaintext.IsValid() {
			return fmt.Errorf("attachment %+v is incomplete", a)
		}
		if p := address.Split(a.Plaintext); p.Tenant != r.TenantID || p.App != r.App || p.Index == 0 {
			return fmt.Errorf("address %v is not of tenant id %d and app %d", a.Plaintext, r.TenantID, r.App)
		}
		if err := n.on.Egress.Validate(a.Egress); err != nil {
			return err
		}
	}
	return nil
}
