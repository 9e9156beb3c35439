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

// DefaultSkip is how many numbers of each kind a restore leaves out unless it is told another number.
const DefaultSkip = 1024

// unfinished is the folder in a data directory in which a restore works. It never counts.
const unfinished = ".restoring"

// RestoreResult is what a restored cluster believes of regions and policies until somebody says otherwise.
type RestoreResult struct {
	BackupHeader
	Regions      []string // the others, as they were
	Edge         string   // the node that was the Edge Switch; empty for none
	WithPolicies []string // tenants with policies
}

// Restore makes the embedded etcd of a new data directory out of a backup.
//
// What was handed out after the backup is not in it. So the next skip prefixes, tenant ids, and apps of each
// tenant are not handed out: a node that has one of them and is away finds it free when it comes back,
// and Register takes it in. And revisions begin above all there were, so that no node goes on
// from one that means something else now.
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
	if err := os.RemoveAll(work); err != nil { // of one that was interrupted
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
				"%s is not empty: it has %s\n  nothing was changed; move what is there away, or name another --data-dir",
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
			return fmt.Errorf("the new store did not take the records: %w", err)
		}
	}
	return nil
}

// revisionsFrom is what a store that is restored now counts revisions from, above all there were: of the store that
// the backup is of, and of others restored from the same file. A store makes fewer changes than 100 in a millisecond;
// the sum is exact in a float64, as metrics are.
func revisionsFrom(h BackupHeader) int64 {
	return 100 * max(time.Now().UnixMilli(), h.Made.UnixMilli())
}

// skipAhead changes the records of a backup to those of a restored cluster.
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
		end       uint64 // the first number that does not exist
	}{{keyPrefixMark, "node prefixes", c.Plan.Nodes()}, {keyTenantMark, "tenant ids", uint64(address.MaxTenantID) + 1}} {
		if err := raise(records, m.key, skip, m.end); err != nil {
			return fmt.Errorf(
				"leaving out %d of %d %s: %w; say with --skip how many were handed out since the backup, at most",
				skip,
				m.end-1,
				m.what,
				err,
			)
		}
	}
	for key := range records {
		if strings.HasPrefix(key, dirSessions) || strings.HasPrefix(key, dirQuarantine) ||
			strings.HasPrefix(key, dirAppQuarantine) { // of then, and no lease to end them
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
	return raisePublished(records, skip)
}

// raiseTenant has the tenant's record count as newer than what nodes have heard of it since, and leaves out what comes
// next of its overlays.
func raiseTenant(records map[string]string, name string, skip uint64) error {
	found := new(pilasterv1.Tenant)
	if err := decode(dirTenants+name, []byte(records[dirTenants+name]), found); err != nil {
		return err
	}
	found.Changes += skip
	found.RetiringApps = nil // what nodes have said of them is of then
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

// raiseApps leaves out at most half of a tenant's, as raiseOverlays does and for the same reason.
func raiseApps(records map[string]string, name string, skip uint64) error {
	next, err := markIn(records, dirAppMarks+name)
	if err != nil {
		return err
	}
	records[dirAppMarks+name] = strconv.FormatUint((max(next, 1)-1+min(skip, uint64(MaxApps)/2))%uint64(MaxApps)+1, 10)
	return nil
}

// markIn is the next number of a backup.
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

// raiseOverlays leaves out at most half of each: numbers go round, and what lies behind is reached last. By then nodes
// have come back and said what they hold.
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

// raisePublished leaves out what comes next at each node's gateway. One that runs out has the publications it has.
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

var errNoneLeft = errors.New("nothing would be left to hand out")

// raise leaves out skip numbers, or all there are.
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
