package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent/policies"
	"pilaster.io/pilaster/internal/agent/state"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/statefile"
	"pilaster.io/pilaster/internal/tenant"
)

// DiskState is the content of a state directory, read file by file, whether or not an agent runs. It has no field for
// keys.
type DiskState struct {
	Node      state.NodeFile              `json:"node"`
	Tenants   []DiskTenant                `json:"tenants"`
	Policies  map[string]policies.File    `json:"policies,omitempty"` // by tenant
	Endpoints map[string]*endpoint.Record `json:"endpoints"`          // by path; null if a record is invalid
}

// DiskTenant is a tenant's file without its keys.
type DiskTenant struct {
	Name       string            `json:"name"`
	Addressing tenant.Addressing `json:"addressing"`
	Created    time.Time         `json:"created"`
	IDs        []struct {
		ID address.TenantID `json:"id"`
	} `json:"ids"`
	Apps    []App `json:"apps"`
	Deleted bool  `json:"deleted,omitempty"`
	Policed bool  `json:"policed,omitempty"`
}

// ReadDiskState reads as much as possible; the error names each file that it could not use.
func ReadDiskState(dir string) (DiskState, error) {
	s := DiskState{Endpoints: endpoint.Peek(dir)}
	errs := []error{statefile.Read(filepath.Join(dir, state.NodeFileName), state.Version, &s.Node)}
	names, err := statefile.Names(filepath.Join(dir, state.TenantsFolder), ".json")
	errs = append(errs, err)
	for _, name := range names {
		path := filepath.Join(dir, state.TenantsFolder, name+".json")
		b, err := os.ReadFile(path)
		var t DiskTenant
		if err == nil {
			err = json.Unmarshal(b, &t)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", path, err))
			continue
		}
		s.Tenants = append(s.Tenants, t)
	}
	policed, err := statefile.Names(filepath.Join(dir, state.PoliciesFolder), ".json")
	if !errors.Is(err, os.ErrNotExist) { // written by an older build
		errs = append(errs, err)
	}
	s.Policies = map[string]policies.File{}
	for _, name := range policed {
		var f policies.File
		path := filepath.Join(dir, state.PoliciesFolder, name+".json")
		if err := statefile.Read(path, state.Version, &f); err != nil {
			errs = append(errs, err)
			continue
		}
		s.Policies[name] = f
	}
	return s, errors.Join(errs...)
}

// validate refuses a record from disk that is invalid for its networks, or whose network this node lacks.
func (c *Core) validate(r endpoint.Record) error {
	for _, name := range r.Networks() {
		n := c.networks.Get(name)
		if n == nil {
			return fmt.Errorf(
				"endpoint %d is on network %s, which this node does not have\n  packets flow as before; %s, or "+
					"remove such containers first",
				r.ID,
				name,
				c.networks.HowToEnable(name),
			)
		}
		if err := n.Validate(r.On(name)); err != nil {
			return &statefile.CorruptError{Path: c.store.RecordPath(r.ID), Err: err}
		}
	}
	return nil
}
