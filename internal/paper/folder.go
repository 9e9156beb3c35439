package paper

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"pilaster.io/pilaster/internal/plot"
)

// PageName is the file name of the page.
const PageName = "index.html"

// Folder stores figures. Figures of earlier runs remain, with their origin, until they are created again.
type Folder string

// Files returns the files that a run with these figures writes.
func Files(only []string) []string {
	all := []string{PageName}
	for _, d := range chosen(only) {
		all = append(all, d.id+".json", d.id+".tsv")
	}
	return all
}

// Put writes a figure's data, and the page again.
func (d Folder) Put(f Figure) error {
	data, err := json.MarshalIndent(f, "", "  ")
	if err != nil {
		return err
	}
	var table, page bytes.Buffer
	f.TSV(&table)
	if err := d.write(f.ID+".json", append(data, '\n')); err != nil {
		return err
	}
	if err := d.write(f.ID+".tsv", table.Bytes()); err != nil {
		return err
	}
	all, err := d.figures()
	if err != nil {
		return err
	}
	if err := Page(&page, all); err != nil {
		return err
	}
	return d.write(PageName, page.Bytes())
}

func (d Folder) write(name string, b []byte) error {
	if err := os.WriteFile(filepath.Join(string(d), name), b, 0o644); err != nil {
		return fmt.Errorf("write the figures: %w", err)
	}
	return nil
}

// figures returns all stored figures, in the paper's order.
func (d Folder) figures() (all []Figure, err error) {
	for _, id := range IDs() {
		path := filepath.Join(string(d), id+".json")
		b, err := os.ReadFile(path)
		if os.IsNotExist(err) {
			continue
		}
		var f Figure
		if err == nil {
			err = json.Unmarshal(b, &f)
		}
		if err != nil {
			return nil, fmt.Errorf(
				"read the figure of an earlier run in %s: %w; remove the file, or choose another folder",
				path,
				err,
			)
		}
		all = append(all, f)
	}
	return all, nil
}

// Page writes figures as one HTML file.
func Page(w io.Writer, figures []Figure) error {
	page := plot.Page{
		Title:   "figures of the NETPILA and NIMITZ paper, plotted again",
		Heading: "Figures of the NETPILA and NIMITZ paper, plotted again",
		Notes: []plot.Note{
			{Class: "what", Text: "Measurements ran on the kernel and the switches of one machine. " +
				"Simulations have the real orchestrator and agents in one process. A model has no NIC and no " +
				"packets. " +
				"The paper's values are from its text, with the section, and never from a plot: they are a " +
				"cross or a line " +
				"named paper. A line named sum is the paper's own arithmetic (§4.1) at other sizes."},
		},
		Foot: []plot.Note{{Class: "soft", Text: "docs/results/paper.md explains this page."}},
	}
	has := map[string]bool{}
	for _, f := range figures {
		has[f.ID] = true
		link := plot.Link{To: f.ID, Text: fmt.Sprintf("%s (%s)", f.Title, f.Nature)}
		if f.Failed != "" {
			link.Bad = "failed"
		}
		page.Contents = append(page.Contents, link)
		page.Sections = append(page.Sections, f.section())
	}
	var missing []string
	for _, d := range definitions {
		if !has[d.id] {
			missing = append(missing, d.id)
		}
	}
	if len(missing) > 0 {
		page.Notes = append(
			page.Notes,
			plot.Note{Class: "soft", Text: "Not plotted: " + strings.Join(missing, ", ") + "."},
		)
	}
	return page.Write(w)
}

func (f Figure) section() plot.Section {
	s := plot.Section{
		ID: f.ID, Title: f.ID + ": " + f.Title,
		Notes: []plot.Note{
			{Class: "soft", Text: fmt.Sprintf("%s · %s · %v · %.1f s", f.Claims, f.Nature, f.Origin, f.Seconds)},
		},
	}
	if f.Failed != "" {
		s.Notes = append(s.Notes, plot.Note{Class: "bad", Text: "It failed: " + f.Failed})
		return s
	}
	s.Notes = append(s.Notes,
		plot.Note{Lead: "Sizes:", Text: f.Sizes + "."},
		plot.Note{Lead: "Measurement:", Text: f.Ran},
		plot.Note{Lead: "Differences:", Text: f.Differs})
	s.Lines = f.Charts()
	s.Table = f.table()
	s.Table.Caption = fmt.Sprintf(
		"%s, %s. Paper: from the text. –: not measured here, or not in the text", f.ID, f.Nature)
	points := "All points"
	if len(f.Panels) == 0 {
		points = "The same rows"
	}
	s.After = []plot.Note{{Class: "soft", Text: fmt.Sprintf(
		"%s are in %s.tsv, and with the scenario in %s.json, beside this file.", points, f.ID, f.ID)}}
	return s
}
