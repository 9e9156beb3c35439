package tenant

import (
	"fmt"
	"net/netip"

	"pilaster.io/pilaster/internal/address"
)

// Guest is a foreign peer among a tenant's containers.
type Guest struct {
	Plaintext netip.Addr
	Address   netip.Addr // what containers see; the plaintext where the tenant is clear
}

// Gateway is the node as its containers of one of the tenant's ids see it: the first index of
// the reserved app that serves, so that whoever knows node, plan and key knows it too.
func (t Tenant) Gateway(plan address.Plan, node netip.Prefix, id ID) (Guest, error) {
	plain := address.Plain{Node: node, Tenant: id.ID, App: address.GatewayApp, Index: 1}
	if t.Addressing == Clear {
		return Guest{plain.Addr(), plain.Addr()}, nil
	}
	found, seen, err := address.NewCipher(id.Key).Draw(plan.Private, plain)
	if err != nil {
		return Guest{}, fmt.Errorf("tenant %s id %d: the node has no address in it: %w", t.Name, id.ID, err)
	}
	return Guest{found.Addr(), seen}, nil
}
