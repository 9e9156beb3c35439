package state

import (
	"fmt"
	"net/netip"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// MembershipFromProto decodes the answer to a registration.
func MembershipFromProto(r *pilasterv1.RegisterResponse) (Membership, error) {
	m := Membership{ClusterUUID: r.GetClusterUuid()}
	m.Plan.Identifiers = r.GetPlan().GetIdentifiers()
	for _, p := range []struct {
		to   *netip.Prefix
		text string
	}{
		{&m.Prefix, r.GetNode().GetPrefix()},
		{&m.Plan.Base, r.GetPlan().GetBasePrefix()},
		{&m.Plan.Private, r.GetPlan().GetPrivatePrefix()},
	} {
		prefix, err := netip.ParsePrefix(p.text)
		if err != nil {
			return m, fmt.Errorf("the orchestrator's answer cannot be used: %w", err)
		}
		*p.to = prefix
	}
	if text := r.GetPlan().GetEgressPrefix(); text != "" {
		prefix, err := netip.ParsePrefix(text)
		if err != nil {
			return m, fmt.Errorf("the orchestrator's answer cannot be used: egress prefix: %w", err)
		}
		m.Plan.Egress = prefix
	}
	for _, text := range r.GetPlan().GetGatewayPrefixes() {
		prefix, err := netip.ParsePrefix(text)
		if err != nil {
			return m, fmt.Errorf("the orchestrator's answer cannot be used: %w", err)
		}
		if prefix.Addr().Is4() {
			m.Plan.Gateway4 = prefix
		} else {
			m.Plan.Gateway6 = prefix
		}
	}
	return m, nil
}
