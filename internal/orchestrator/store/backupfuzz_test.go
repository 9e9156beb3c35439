package store

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strconv"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/fuzzmutate"
)

// FuzzBackup checks that parseBackup returns all records of a file or an error, and an error if a byte of the file was
// changed or appended. A restored cluster allocates neither the numbers in the backup nor the skipped ones.
func FuzzBackup(f *testing.F) {
	r, err := newCluster(address.Plan{})
	if err != nil {
		f.Fatal(err)
	}
	cluster, err := json.Marshal(r)
	if err != nil {
		f.Fatal(err)
	}
	kept := []backupRecord{
		{keyCluster, string(cluster)},
		{dirTenants + "blue", `{"name":"blue"}`},
		{dirAppMarks + "blue", "65270"},
		{dirTenants + "red", `{"name":"red"}`},
		{keyPrefixMark, "3"},
		{keyTenantMark, "16777200"},
		{dirSessions + "n1", "o1 i1 s1"},
		{dirNodes + "n1", `{"name":"n1"}`},
		{dirNodes + "n2", `{"name":"n2"}`},
		{dirPublishedMarks + "n2", "16777200"},
		{keyServicesMark, "3"},
		{dirServiceMarks + "blue", "4294967290"},
	}
	header, err := json.Marshal(
		BackupHeader{
			Format:     backupFormat,
			Version:    backupVersion,
			Cluster:    r.UUID,
			BasePrefix: r.BasePrefix,
			Revision:   9,
			Records:    len(kept),
		},
	)
	if err != nil {
		f.Fatal(err)
	}
	records, err := json.Marshal(kept)
	if err != nil {
		f.Fatal(err)
	}
	good := string(records)
	f.Add(header, records, fuzzmutate.Nothing, []byte{}, uint16(0), byte(0), uint64(5))
	const from = 7
	f.Fuzz(func(t *testing.T, header, records, script, more []byte, at uint16, flip byte, skip uint64) {
		var lines []json.RawMessage
		if json.Unmarshal(fuzzmutate.JSON(records, script, good), &lines) != nil {
			return
		}
		text := append(bytes.Clone(header), '\n')
		for _, line := range lines {
			text = append(append(text, line...), '\n')
		}
		text = fmt.Appendf(text, "%s%x\n", sumPrefix, sha256.Sum256(text))
		text[int(at)%len(text)] ^= flip
		text = append(text, more...)
		h, got, err := parseBackup(text)
		if err != nil {
			return
		}
		if flip != 0 || len(more) > 0 {
			t.Fatalf("accepted a damaged backup: %q", text)
		}
		if h.Records != len(got) || h.Format != backupFormat || h.Version != backupVersion {
			t.Fatalf("read %d records, the header is %+v", len(got), h)
		}
		for _, line := range lines {
			var r backupRecord
			if err := json.Unmarshal(line, &r); err != nil || got[r.Key] != r.Value || !strings.HasPrefix(r.Key, root) {
				t.Fatalf("record %s was read as %q, %v", line, got[r.Key], err)
			}
		}
		restored := maps.Clone(got)
		if skipAhead(restored, skip, from) == nil {
			checkRestored(t, got, restored, skip)
		}
	})
}

// checkRestored compares the records of a backup with those of the restored cluster.
func checkRestored(t *testing.T, was, is map[string]string, skip uint64) {
	t.Helper()
	var after clusterRecord
	if err := json.Unmarshal([]byte(is[keyCluster]), &after); err != nil || after.From == 0 {
		t.Fatalf("the offset of revisions is %d, %v; want more than 0", after.From, err)
	}
	plan := address.Plan{Base: after.BasePrefix, Private: after.PrivatePrefix}
	marks := map[string]uint64{keyPrefixMark: plan.Nodes(), keyTenantMark: 1 << 24, keyOffloadMark: 1 << 24,
		keyServicesMark: 1 << 24}
	least := map[string]uint64{}
	for key := range was {
		if tenant, ok := strings.CutPrefix(key, dirTenants); ok {
			marks[dirAppMarks+tenant] = 0xff00
			checkNewer(t, key, was[key], is[key], skip)
		}
		if strings.HasPrefix(key, dirServiceMarks) {
			marks[key], least[key] = 1<<32, 1
		}
		if node, ok := strings.CutPrefix(key, dirNodes); ok {
			mark := dirPublishedMarks + node
			marks[mark], least[mark] = 1<<24, 2
			mark = dirGatewayMarks + node
			marks[mark], least[mark] = 1<<16, 16
		}
	}
	for key, end := range marks {
		next, err1 := strconv.ParseUint(is[key], 10, 64)
		had := uint64(1)
		if was[key] != "" {
			had, _ = strconv.ParseUint(was[key], 10, 64)
		}
		had = max(had, least[key])
		full := next >= end && (strings.HasPrefix(key, dirAppMarks) || least[key] > 0)
		if err1 != nil || next < had || next-had != skip && !full && had < end {
			t.Fatalf("%s was %q and is %q after skipping %d", key, was[key], is[key], skip)
		}
	}
	leased := func(key string) bool {
		return strings.HasPrefix(key, dirSessions) || strings.HasPrefix(key, dirQuarantine)
	}
	for key, value := range is {
		if leased(key) {
			t.Fatalf("the restored cluster has %s, which expires", key)
		}
		if _, mark := marks[key]; !mark && key != keyCluster && !strings.HasPrefix(key, dirTenants) &&
			value != was[key] {
			t.Fatalf("%s was %q and is %q", key, was[key], value)
		}
	}
	for key := range was {
		if _, there := is[key]; !there && !leased(key) {
			t.Fatalf("the restored cluster lacks %s", key)
		}
	}
}

// checkNewer compares a tenant's records: only the change counter is higher.
func checkNewer(t *testing.T, key, was, is string, skip uint64) {
	t.Helper()
	before, after := new(pilasterv1.Tenant), new(pilasterv1.Tenant)
	if err := errors.Join(decode(key, []byte(was), before), decode(key, []byte(is), after)); err != nil {
		t.Fatal(err)
	}
	if before.Changes += skip; !proto.Equal(before, after) {
		t.Fatalf("%s was %s and is %s after skipping %d", key, was, is, skip)
	}
}
