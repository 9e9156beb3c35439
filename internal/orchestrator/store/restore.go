package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/encoding/protojson"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/statefile"
	"pilaster.io/pilaster/internal/tenant"
)

// DefaultSkip is how many numbers a restore skips by default, of prefixes, of tenant ids and so on.
const DefaultSkip = 1024

// unfinished is the folder in a data directory in which a restore works. Its content is never used.
const unfinished = ".restoring"

// RestoreResult lists the other regions and the policies of a restored cluster, which may be outdated.
type RestoreResult struct {
	BackupHeader
	Regions      []string // other regions
	Edge         string   // node that is the Edge Switch; empty for none
	WithPolicies []string // tenants with policies
}

// Restore creates the embedded etcd of a new data directory from a backup.
//
// Allocations after the backup are lost. So the restored store skips numbers: the parameter skip is how many prefixes,
// tenant ids, and apps of each tenant. When a node with a skipped number reconnects, Register finds it free.
// Revisions begin above all earlier ones, so that no node resumes from a revision of the lost history.
func Restore(ctx context.Context, file, dataDir string, skip uint64, log *slog.Logger) (is RestoreResult, err error) {
	header, records, err := ReadBackup(file)
	if err != nil {
		return is, err
	}
	is = RestoreResult{BackupHeader: header, Edge: records[keyEdge]}
	for _, key := range slices.Sorted(maps.Keys(records)) {
		if name, ok := strings.CutPrefix(key, dirRegions); ok {
			is.Regions = append(is.Regions, name)
		}
		if name, ok := strings.CutPrefix(key, dirPolicies); ok {
			name, _, _ = strings.Cut(name, "/")
			is.WithPolicies = append(is.WithPolicies, name)
		}
	}
	is.WithPolicies = slices.Compact(is.WithPolicies)
	if err := skipAhead(records, skip, revisionsFrom(header)); err != nil {
		return is, fmt.Errorf("%w\n  nothing was changed", err)
	}
	if err := checkEmpty(dataDir); err != nil {
		return is, err
	}
	if err := os.MkdirAll(dataDir, 0o700); err != nil {
		return is, err
	}
	work := filepath.Join(dataDir, unfinished)
	defer os.RemoveAll(work)
	if err := os.RemoveAll(work); err != nil { // files of an interrupted restore
		return is, err
	}
	if err := fill(ctx, work, records, log); err != nil {
		return is, err
	}
	if err := os.Rename(filepath.Join(work, "etcd"), filepath.Join(dataDir, "etcd")); err != nil {
		return is, err
	}
	return is, statefile.SyncDir(dataDir)
}

func checkEmpty(dataDir string) error {
	entries, err := os.ReadDir(dataDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, e := range entries {
		if e.Name() != unfinished {
			return fmt.Errorf(
				"%s is not empty: it has %s\n  nothing was changed; move its content away, or choose another "+
					"--data-dir",
				dataDir,
				e.Name(),
			)
		}
	}
	return err
}

func fill(ctx context.Context, dir string, records map[string]string, log *slog.Logger) error {
	e, err := Embed(ctx, dir, log)
	if err != nil {
		return err
	}
	defer e.Close()
	keys := slices.Sorted(maps.Keys(records))
	for len(keys) > 0 {
		var puts []clientv3.Op
		for bytes := 0; len(keys) > 0 && len(puts) < maxOps; keys = keys[1:] {
			key := keys[0]
			if bytes += len(key) + len(records[key]); bytes > maxBytes && len(puts) > 0 {
				break
			}
			puts = append(puts, clientv3.OpPut(key, records[key]))
		}
		once, cancel := context.WithTimeout(ctx, requestTimeout)
		_, err := e.Client.Txn(once).Then(puts...).Commit()
		cancel()
		if err != nil {
			return fmt.Errorf("the new store did not accept the records: %w", err)
		}
	}
	return nil
}

// revisionsFrom returns the offset of revisions of the restored store. It is higher than all revisions of the backed-up
// store, and of other stores restored from the same file: a store commits fewer than 100 changes per millisecond. The
// sum is exact as a float64, which metrics use.
func revisionsFrom(h BackupHeader) int64 {
	return 100 * max(time.Now().UnixMilli(), h.Made.UnixMilli())
}

// skipAhead changes the records of a backup into those of the restored cluster.
func skipAhead(records map[string]string, skip uint64, from int64) error {
	var r clusterRecord
	if err := json.Unmarshal([]byte(records[keyCluster]), &r); err != nil {
		return fmt.Errorf("the backup's cluster record is not readable: %w", err)
	}
	r.From = from
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	records[keyCluster] = string(text)
	c, err := r.cluster()
	if err != nil {
		return err
	}
	for _, m := range []struct {
		key, what string
		end       uint64 // first number beyond the range
	}{{keyPrefixMark, "node prefixes", c.Plan.Nodes()},
		{keyTenantMark, "tenant ids", uint64(address.MaxTenantID) + 1},
		{keyOffloadMark, "ids of offloads", tenant.MaxOffloadID + 1},
		{keyServicesMark, "numbers of tenants for services", address.MaxServicesNumber + 1}} {
		if err := raise(records, m.key, skip, m.end); err != nil {
			return fmt.Errorf(
				"skipping %d of %d %s: %w; set --skip to the most that can have been allocated since the backup",
				skip,
				m.end-1,
				m.what,
				err,
			)
		}
	}
	for key := range records {
		if k, _ := kindOf(key); k.leased {
			delete(records, key)
		}
		if tenant, ok := strings.CutPrefix(key, dirTenants); ok {
			if err := raiseApps(records, tenant, skip); err != nil {
				return err
			}
			if err := raiseTenant(records, tenant, skip); err != nil {
				return err
			}
		}
	}
	return errors.Join(dropReservations(records), raisePublished(records, skip), raiseGateways(records, skip),
		raiseServices(records, skip))
}

// raiseServices skips addresses of each tenant's services. It is no error if a tenant then has none left.
func raiseServices(records map[string]string, skip uint64) error {
	for key := range records {
		if !strings.HasPrefix(key, dirServiceMarks) {
			continue
		}
		if err := raise(records, key, skip, maxServiceAddress+1); err != nil && !errors.Is(err, errNoneLeft) {
			return err
		}
	}
	return nil
}

// dropReservations drops the records of address keys that no container has: their lease is lost.
func dropReservations(records map[string]string) error {
	for key, text := range records {
		of, is := strings.CutPrefix(key, dirAddressKeys)
		if !is {
			continue
		}
		name, _, _ := strings.Cut(of, "/")
		k, err := parseKeyedAddress(text)
		if err != nil {
			return err
		}
		if records[mappingKey(name, k.to)] == "" {
			delete(records, key)
		}
	}
	return nil
}

// raiseTenant raises the tenant's change counter above the values that nodes may have received since the backup, and
// skips prefixes of its overlays.
func raiseTenant(records map[string]string, name string, skip uint64) error {
	found := new(pilasterv1.Tenant)
	if err := decode(dirTenants+name, []byte(records[dirTenants+name]), found); err != nil {
		return err
	}
	found.Changes += skip
	found.RetiringApps = nil // nodes may have confirmed the round before the restore
	// Since the backup, the offloads may have got other frontends, which have the rules, and another epoch. Without a
	// record, each node applies its own rules, whatever it did before.
	found.Offloads = nil
	text, err := protojson.Marshal(found)
	if err != nil {
		return fmt.Errorf("encode %s: %w", dirTenants+name, err)
	}
	records[dirTenants+name] = string(text)
	overlays, err := tenant.ParseOverlays(found.Overlays)
	if err != nil {
		return fmt.Errorf("the backup's tenant %s is not readable: %w", name, err)
	}
	return raiseOverlays(records, name, overlays, skip)
}

// raiseApps skips at most half of a tenant's apps, for the same reason as raiseOverlays.
func raiseApps(records map[string]string, name string, skip uint64) error {
	next, err := markIn(records, dirAppMarks+name)
	if err != nil {
		return err
	}
	records[dirAppMarks+name] = strconv.FormatUint((max(next, 1)-1+min(skip, uint64(MaxApps)/2))%uint64(MaxApps)+1, 10)
	return nil
}

// markIn returns the next number of a mark in a backup.
func markIn(records map[string]string, mark string) (uint64, error) {
	text := records[mark]
	if text == "" {
		return 1, nil
	}
	next, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("the backup's %s is not readable: %w", mark, err)
	}
	return next, nil
}

// raiseOverlays skips at most half of each overlay. Allocation wraps around and reaches the skipped prefixes last, when
// the nodes have reported the prefixes that they have.
func raiseOverlays(records map[string]string, name string, overlays []tenant.Overlay, skip uint64) error {
	for _, o := range overlays {
		next, err := markIn(records, overlayMark(name, o))
		if err != nil {
			return err
		}
		_, count := o.Given()
		records[overlayMark(name, o)] = strconv.FormatUint((next+min(skip, count/2))%count, 10)
	}
	return nil
}

// raisePublished skips indexes at each node's gateway. It is no error if a gateway then has no free indexes: the
// gateway keeps its publications.
func raisePublished(records map[string]string, skip uint64) error {
	next := map[string]address.Index{}
	for key, text := range records {
		if node, ok := strings.CutPrefix(key, dirNodes); ok {
			next[node] = max(next[node], tenant.FirstPublished)
		}
		if !strings.HasPrefix(key, dirTenants) {
			continue
		}
		found := new(pilasterv1.Tenant)
		if err := decode(key, []byte(text), found); err != nil {
			return err
		}
		highest, err := highestIndexes(found)
		if err != nil {
			return err
		}
		for node, i := range highest {
			next[node] = max(next[node], i+1)
		}
	}
	for node, from := range next {
		mark := dirPublishedMarks + node
		if was, err := strconv.ParseUint(records[mark], 10, 64); records[mark] == "" ||
			err == nil && was < uint64(from) {
			records[mark] = strconv.FormatUint(uint64(from), 10)
		}
		if err := raise(records, mark, skip, uint64(address.MaxIndex)+1); err != nil && !errors.Is(err, errNoneLeft) {
			return err
		}
	}
	return nil
}

// raiseGateways skips indexes of each node as an egress gateway. It is no error if a node then has none left.
func raiseGateways(records map[string]string, skip uint64) error {
	for key := range records {
		node, ok := strings.CutPrefix(key, dirNodes)
		if !ok {
			continue
		}
		mark := dirGatewayMarks + node
		next, err := markIn(records, mark)
		if err != nil {
			return err
		}
		records[mark] = strconv.FormatUint(max(next, uint64(tenant.FirstGatewayIndex)), 10)
		if err := raise(records, mark, skip, uint64(tenant.FirstEgressIndex)); err != nil &&
			!errors.Is(err, errNoneLeft) {
			return err
		}
	}
	return nil
}

var errNoneLeft = errors.New("none would be left to allocate")

// raise skips numbers, at most all that are left. It returns errNoneLeft if none is left.
func raise(records map[string]string, mark string, skip, end uint64) error {
	next, err := markIn(records, mark)
	if err != nil {
		return err
	}
	left := end - min(next, end)
	records[mark] = strconv.FormatUint(next+min(skip, left), 10)
	if left > 0 && skip >= left {
		return errNoneLeft
	}
	return nil
}
