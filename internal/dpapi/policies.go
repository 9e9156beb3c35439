package dpapi

import (
	"net/netip"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/policy"
)

// Policies fills and queries the tables of network policies.
type Policies interface {
	// RestorePolicies enforces the policies of these tenants. Tenants in held keep the policies that an earlier process
	// left in the kernel; if there are none, their containers are isolated, unless the tenant is Lost. Policies of all
	// other tenants are removed. After an error nothing has changed. Allowed packets keep flowing meanwhile.
	RestorePolicies(tenants, held []TenantPolicies) error
	// SetPolicies replaces the policies of one tenant and leaves those of others unchanged. The caller does not change
	// the argument afterwards.
	SetPolicies(TenantPolicies) error

	// LookupPolicy queries the tables by which the programs decide on packets.
	LookupPolicy(PolicyQuery) (PolicyVerdict, error)
}

// TenantPolicies are the policies of one tenant, compiled into tables.
type TenantPolicies struct {
	Tenant string
	IDs    []address.TenantID // all that belong to it
	// the tenant's file was lost: IDs may be incomplete, and it may have policies or not; only RestorePolicies reads it
	Lost      bool
	Tables    policy.Tables
	Overrides map[netip.Addr]address.AppID // canonical addresses of containers whose app differs from the address now
}

// Selects reports whether a policy selects any app of the tenant.
func (t TenantPolicies) Selects() bool { return len(t.Tables.Subjects) > 0 }

// Restricts reports whether a policy that is not in audit mode selects any app of the tenant.
func (t TenantPolicies) Restricts() bool {
	for _, s := range t.Tables.Subjects {
		if s.Sets != [2]policy.ID{} {
			return true
		}
	}
	return false
}

// PolicyQuery asks for the verdict on a session that need not exist; either end may begin it.
type PolicyQuery struct {
	Tenant              address.TenantID
	Local, Remote       netip.Addr    // canonical
	LocalApp, RemoteApp address.AppID // as the addresses say
	Protocol            uint8
	LocalPort           uint16
	RemotePort          uint16
}

// PolicyVerdict is what the kernel's own tables say of a PolicyQuery.
type PolicyVerdict struct {
	LocalApp, RemoteApp address.AppID // as they are now
	Allowed             [2]bool       // by policy.Direction, seen from the local end
	Rules, Audits       [2]uint32     // the rule that decided, and the one that would have denied; 0 means none
}
