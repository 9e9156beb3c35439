package nic

import (
	"bytes"
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

func destination(vni pipeline.VNI, to string, packets uint64) Destination {
	return Destination{Megaflow{vni, netip.MustParsePrefix(to)}, packets}
}

// TestMatrixFile: ReadMatrix returns the matrix that was written, with the busiest destination first and without
// destinations that had no packet.
func TestMatrixFile(t *testing.T) {
	m := Matrix{Source: "a lab,\nnode n1", Destinations: []Destination{
		destination(
			7,
			"10.0.2.0/24",
			5,
		), destination(7, "10.0.9.0/24", 0), destination(8, "10.0.2.0/24", 90), destination(7, "fd10:0:0:1::/64", 5),
	}}
	m.Sort()
	var file bytes.Buffer
	if err := m.Write(&file); err != nil {
		t.Fatal(err)
	}
	want := matrixHead + "\n# a lab, node n1\n8\t10.0.2.0/24\t90\n7\t10.0.2.0/24\t5\n7\tfd10:0:0:1::/64\t5\n"
	if file.String() != want {
		t.Errorf("%q", file.String())
	}
	m.Source = "a lab, node n1"
	if got, err := ReadMatrix(&file); err != nil || !reflect.DeepEqual(got, m) {
		t.Errorf("got %+v: %v", got, err)
	}
	for text, says := range map[string]string{
		"": "the matrix is empty", "7\t10.0.0.0/24\t1\n": "line 1 is not", matrixHead +
			"\n# x\n# y\n": "sent nothing to other nodes", matrixHead + "\n7\t10.0.0.0/24\n": "line 2: ",
		matrixHead + "\n0\t10.0.0.0/24\t1\n": "not a VNI", matrixHead + "\n16777216\t10.0.0.0/24\t1\n": "not a VNI",
		matrixHead + "\n7\t10.0.0.1/24\t1\n": "not a prefix",
		matrixHead + "\n7\t10.0.0.0/24\t0\n": "not a number of " +
			"packets", matrixHead + "\n7\t10.0.0.0/24\t1\n\n": "line 3: ",
		matrixHead + "\n7\t10.0.0.0/24\t1\n7\t10.0.0.0/24\t2\n": "duplicate destination", "# pilaster traffic matrix " +
			"2\n": "another version",
	} {
		if _, err := ReadMatrix(strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: got error %v, want %s", text, err, says)
		}
	}
}

func FuzzReadMatrix(f *testing.F) {
	f.Add(matrixHead + "\n# x\n7\t10.0.0.0/24\t1\n8\tfd10::/64\t9\n")
	f.Fuzz(func(t *testing.T, text string) {
		m, err := ReadMatrix(strings.NewReader(text))
		if err != nil {
			return
		}
		var file bytes.Buffer
		if err := m.Write(&file); err != nil {
			t.Fatal(err)
		}
		m.Source = strings.Join(strings.Fields(m.Source), " ")
		if again, err := ReadMatrix(&file); err != nil || !reflect.DeepEqual(again, m) {
			t.Errorf("%+v reads back as %+v: %v", m, again, err)
		}
	})
}

// TestPreheatingFromAFile: preheating from a file equals preheating from the rehearsal itself. A tenth of the file is
// not enough for the peak. If DrawRecorded gets a second record as the job, the job sends to the destinations of this
// record.
func TestPreheatingFromAFile(t *testing.T) {
	find := func(r *Report, what string) float64 {
		t.Helper()
		for _, f := range r.Figures[0].Findings {
			if f.What == what {
				return f.Value
			}
		}
		t.Fatalf("no finding %q", what)
		return 0
	}
	const waits = "1,000/s, preheated: longest queue"
	own, err := Draw(t.Context(), 3, 8)
	if err != nil {
		t.Fatal(err)
	}
	var file bytes.Buffer
	if err := Rehearse(3).Write(&file); err != nil {
		t.Fatal(err)
	}
	m, err := ReadMatrix(&file)
	if err != nil {
		t.Fatal(err)
	}
	r, err := DrawRecorded(t.Context(), 3, m, nil)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(r.Figures[0].Findings[3:], own.Figures[0].Findings) || find(r, waits) > 40 ||
		find(r, "of them, destinations of the job") != float64(len(m.Destinations)) {
		t.Errorf("with the file %+v, without %+v", r.Figures[0].Findings, own.Figures[0].Findings)
	}
	tenth := m
	tenth.Destinations = m.Destinations[:len(m.Destinations)/10]
	if r, err = DrawRecorded(t.Context(), 3, tenth, nil); err != nil || find(r, waits) < 500 {
		t.Errorf("with a tenth of the record: %v, %+v", err, r)
	}
	if r, err = DrawRecorded(t.Context(), 3, m, &tenth); err != nil {
		t.Fatal(err)
	}
	// The job has sent to all destinations long before the end of the peak. The report states this, and evaluates the
	// queue from then on.
	few := fmt.Sprintf("1,000/s, %d in all", len(tenth.Destinations))
	if find(r, "destinations of the job") != float64(len(tenth.Destinations)) ||
		find(r, few+", preheated: longest queue") != 0 ||
		find(r, few+": longest queue") < 100 ||
		find(r, few+": queue empty, after the peak's end") < 0.2 ||
		find(r, fmt.Sprintf("600/s, %d in all: longest queue", len(tenth.Destinations))) > 40 {
		t.Errorf("with another record as the job: %+v", r.Figures[0].Findings)
	}
	for _, f := range r.Figures[0].Findings {
		if f.Paper != "" {
			t.Errorf("%+v is compared with the paper's peak, but the job is another one", f)
		}
	}
	other := Matrix{Destinations: []Destination{destination(99, "10.0.0.0/29", 1)}}
	if _, err := DrawRecorded(t.Context(), 3, other, nil); err == nil ||
		!strings.Contains(err.Error(), "the matrix has 1 destination, and the job sends to none of them") ||
		!strings.HasSuffix(err.Error(), "; a record of a switch needs --job with a second record") {
		t.Errorf("another tenant's matrix: got error %v", err)
	}
}
