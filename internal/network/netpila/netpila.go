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
	plan    address.Plan
	node    netip.Prefix
	indexes network.Indexes
}

// New returns the network of the node that owns the /64. It refuses a prefix outside the plan.
func New(plan address.Plan, node netip.Prefix, indexes network.Indexes, path network.Dataplane) (*Network, error) {
	if err := plan.Validate(); err != nil {
		return nil, err
	}
	if !plan.ContainsNode(node) {
		return nil, fmt.Errorf("node prefix %v is not a /64 in the base prefix %v", node, plan.Base)
	}
	return &Network{path, plan, node, indexes}, nil
}

// Prepare allocates an address under the endpoint's tenant id. It sends no message (NP1, §6.1). Release releases the
// address.
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
	plain := address.Plain{Node: n.node, Tenant: id.ID, App: app}
	a := endpoint.Attachment{Network: Name, Gateway: netip.MustParseAddr("fe80::1")}

	var err error
	if t.Addressing == tenant.Clear {
		plain.Index, err = n.indexes.AllocateIndex(key, firstIndex)
		a.Address = plain.Addr()
		a.Routes = []netip.Prefix{n.plan.Base}
	} else {
		cipher := address.NewCipher(id.Key)
		plain.Index, err = n.indexes.AllocateIndex(key, func(from address.Index) (address.Index, error) {
			plain.Index = from
			found, _, err := cipher.Draw(n.plan.Private, plain)
			return found.Index, err
		})
		a.Address = cipher.Encrypt(plain.Addr())
		a.Routes = []netip.Prefix{n.plan.Private}
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
	return []endpoint.Attachment{a}, nil
}

// firstIndex accepts every index: a clear address need not lie in the private prefix.
func firstIndex(from address.Index) (address.Index, error) {
	if from > address.MaxIndex {
		return 0, address.ErrExhausted
	}
	return from, nil
}

// Release puts the address into quarantine.
func (n *Network) Release(_ context.Context, r endpoint.Record) error {
	for _, a := range r.Attachments {
		if key, i, drawn := r.AllocatedIndex(a); drawn {
			if err := n.indexes.ReleaseIndex(key, i); err != nil {
				return err
			}
		}
	}
	return nil
}

// Validate refuses a plaintext address that does not name this node, the tenant id and the app.
func (n *Network) Validate(r endpoint.Record) error {
	for _, a := range r.Attachments {
		if !a.Address.Is6() || !a.Plaintext.IsValid() {
			return fmt.Errorf("attachment %+v is incomplete", a)
		}
		if p := address.Split(a.Plaintext); p.Tenant != r.TenantID || p.App != r.App || p.Index == 0 {
			return fmt.Errorf("address %v is not of tenant id %d and app %d", a.Plaintext, r.TenantID, r.App)
		}
	}
	return nil
}
