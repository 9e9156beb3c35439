package policies

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent/state"
	"pilaster.io/pilaster/internal/statefile"
)

// File is the file with a tenant's policies.
type File struct {
	Version   int                          `json:"version"`
	Documents []Document                   `json:"documents"`
	Overrides map[netip.Addr]address.AppID `json:"overrides,omitempty"`
}

// Open reads <dir>/policies, and sets damaged files aside.
func Open(disk statefile.Disk, damages *statefile.Damages, dir string) (*Manager, error) {
	m := &Manager{
		damages: damages,
		disk:    disk,
		dir:     filepath.Join(dir, state.PoliciesFolder),
		tenants: map[string]*tenantPolicy{},
		times:   newDurations(),
	}
	if err := disk.MakeFolder(m.dir); err != nil {
		return nil, err
	}
	names, err := disk.Names(m.dir, ".json")
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		read, err := m.read(name)
		if err != nil {
			read = unreadPolicy(err)
			err = damages.SetAside(err, instead(name))
		}
		if err != nil {
			return nil, err
		}
		m.tenants[name] = read
	}
	return m, nil
}

func instead(tenant string) string {
	return fmt.Sprintf("the policies of tenant %s that are in the kernel stay in force until the orchestrator sends "+
		"the tenant's policies; until then no container of it is added here", tenant)
}

func (m *Manager) read(name string) (*tenantPolicy, error) {
	var f File
	if err := m.disk.Read(m.path(name), state.Version, &f); err != nil {
		return nil, err
	}
	read := newTenantPolicy()
	read.apply(Update{Tenant: name, Whole: true, Documents: f.Documents, Overrides: f.Overrides})
	for _, err := range read.parseErrors {
		return nil, &statefile.CorruptError{Path: m.path(name), Err: err}
	}
	read.unsaved = false
	close(read.synced)
	return read, nil
}

func (m *Manager) path(name string) string { return filepath.Join(m.dir, name+".json") }

// write stores a tenant's policies. A tenant without policies has no file.
func (m *Manager) write(name string, of *tenantPolicy) error {
	documents := slices.SortedFunc(maps.Values(of.documents), func(a, b Document) int {
		return strings.Compare(a.Kind+"/"+a.Namespace+"/"+a.Name, b.Kind+"/"+b.Namespace+"/"+b.Name)
	})
	b, err := encode(documents, of.overrides)
	if err == nil {
		err = m.disk.WriteBytes(m.path(name), b, 0o600)
	}
	if err != nil {
		return fmt.Errorf("writing policies of tenant %s: %w", name, err)
	}
	m.damages.Replaced(m.path(name))
	return nil
}

func (m *Manager) remove(name string) error {
	err := m.disk.Remove(m.path(name))
	if err == nil {
		m.damages.Replaced(m.path(name))
	}
	return err
}

// encode encodes a policyFile. The file can have megabytes and is rewritten at each change, so it is built in
// one buffer of sufficient size.
func encode(documents []Document, overrides map[netip.Addr]address.AppID) ([]byte, error) {
	rest, err := json.Marshal(File{Version: state.Version, Documents: []Document{}, Overrides: overrides})
	if err != nil {
		return nil, err
	}
	const empty = `"documents":[`
	at := bytes.Index(rest, []byte(empty)) + len(empty)
	size := len(rest)
	for _, d := range documents {
		size += len(d.Text) + len(d.Text)/4 + 200 // escapes and names
	}
	b := append(make([]byte, 0, size), rest[:at]...)
	for i, d := range documents {
		one, err := json.Marshal(d)
		if err != nil {
			return nil, err
		}
		if i > 0 {
			b = append(b, ",\n"...)
		}
		b = append(b, one...)
	}
	return append(b, rest[at:]...), nil
}
